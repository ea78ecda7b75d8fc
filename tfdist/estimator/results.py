"""Communication between evaluator and chief, by files in `model_dir`.

The chief exits last: it announces the end of training and waits for the result
of the last checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import tensorflow as tf

from tfdist._tf import storage
from tfdist.checkpoint.names import missing, saved_shapes

_log = logging.getLogger(__name__)

RESULT_FILE = "latest.json"
FAILURE_FILE = "failure.json"
POLL_SECS = 0.5
STORE_POLL_SECS = 5.0  # Object stores charge for each request.
# When a waiting chief gives up on a failing evaluator. The launcher restarts it
# after 0, 1, 2 s, Kubernetes after 10, 20, 40 s.
_MOST_FAILURES = 3
_COME_BACK_SECS = 60.0
_SAY_SECS = 30.0  # Between lines that say for how long it has waited.


def eval_dir(model_dir: str, name: str | None) -> str:
    """Returns the directory of the evaluation called `name`."""
    return os.path.join(model_dir, f"eval_{name}" if name else "eval")


def warn_of_untrained(model_dir: str) -> None:
    """Warns that there is no checkpoint and the model is untrained."""
    _log.warning(
        "There is no checkpoint in %r: the model is untrained, with its "
        "initial weights.",
        storage.absolute(model_dir),
    )


def warn_of_left_out(path: str, names: Iterable[str]) -> None:
    """Warns of weights in a checkpoint that the model with `names` lacks."""
    left = missing(saved_shapes(path), names)
    if left:
        _log.warning(
            "The model lacks variables %s of %s: it is not the model that was "
            "trained, unless these variables never affected its results. "
            "Estimator.train would raise an error.",
            ", ".join(left[:20]),
            path,
        )


def warn_if_lost(model_dir: str, step: int, trained_to: int) -> None:
    """Warns if a session begins before the step an earlier one reached."""
    if step < trained_to:
        _log.warning(
            "This estimator has trained to step %d, but now starts at step %d: "
            "%r has no later checkpoint.",
            trained_to,
            step,
            storage.absolute(model_dir),
        )


def done_path(model_dir: str) -> str:
    """Returns the path of the file that announces the end of training."""
    return os.path.join(model_dir, "training_done.json")


def announce_end(model_dir: str, step: int) -> None:
    """Announces to the evaluator that training has ended at `step`."""
    write_json(done_path(model_dir), {"global_step": step, "time": time.time()})


def retract_end(model_dir: str) -> None:
    """Retracts an earlier chief's announcement: training continues."""
    if tf.io.gfile.exists(done_path(model_dir)):
        tf.io.gfile.remove(done_path(model_dir))


def poll_secs(model_dir: str) -> float:
    """Returns the seconds between two polls of a job's files."""
    on_store = storage.is_object_store(model_dir)
    return STORE_POLL_SECS if on_store else POLL_SECS


def wait_for_result(
    model_dir: str, name: str | None, step: int, timeout_secs: float
) -> dict[str, Any] | None:
    """Waits until the evaluator has published its last result and exports.

    Repeatedly announces that training has ended at `step`, because an evaluator
    that starts late cannot tell this announcement from an earlier job's.
    Returns None, with a warning, if there is no result within `timeout_secs`,
    or if the evaluator fails too often or for too long.
    """
    directory = eval_dir(model_dir, name)
    newest = tf.train.latest_checkpoint(model_dir)
    wanted = newest and identity_of(newest)
    start = failed_at = said = time.monotonic()
    failure, failures, problem = None, 0, ""
    _log.info("Waiting for the evaluator's result of step %d.", step)
    while not problem:
        announce_end(model_dir, step)
        result = read_json(os.path.join(directory, RESULT_FILE))
        if result and result["final"] and result["checkpoint"] == wanted:
            return result
        found = read_json(os.path.join(directory, FAILURE_FILE))
        now = time.monotonic()
        if found and found != failure:
            failure, failures, failed_at = found, failures + 1, now
            _log.warning(
                "The evaluator failed, and may be started again: %s",
                found["error"],
            )
        stays_away = now - failed_at >= _COME_BACK_SECS
        if found and (stays_away or failures >= _MOST_FAILURES):
            problem = f"The evaluator failed: {found['error']}"
        elif now - start >= timeout_secs:
            problem = (
                f"It was not ready after {timeout_secs:g} s; to wait longer, "
                "raise RunConfig(evaluator_timeout_secs=...)."
            )
        else:
            if now - said >= _SAY_SECS:
                said = now
                _log.info(
                    "Still waiting for the evaluator's result: %.0f of at most "
                    "%g s. Is the evaluator running?",
                    now - start,
                    timeout_secs,
                )
            time.sleep(poll_secs(model_dir))
    _log.warning(
        "The job ends without the evaluator's result of step %d and without "
        "the final exports. %s",
        step,
        problem,
    )
    return None


def write_json(path: str, value: object) -> None:
    """Writes a JSON file atomically."""
    storage.write_text(path, json.dumps(value))


def read_json(path: str) -> dict[str, Any] | None:
    """Reads what `write_json` wrote; None if there is no file."""
    text = storage.read_text(path)
    try:
        return None if text is None else json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"File {path} is damaged: {error}. Delete it to go on without it."
        ) from error


class DamagedCheckpointError(ValueError):
    """A checkpoint that cannot be read."""


@contextlib.contextmanager
def reading(path: str | None) -> Iterator[None]:
    """Raises `DamagedCheckpointError` for errors in reading a checkpoint."""
    try:
        yield
    except (tf.errors.OpError, IndexError, RuntimeError) as error:
        if not (path and storage.is_damage(error)):
            raise
        raise DamagedCheckpointError(
            f"Checkpoint {path} is damaged or missing. TensorFlow reports: "
            + str(error).partition("\n")[0]
        ) from error


def identity_of(path: str) -> list[str]:
    """Identifies a checkpoint, even among others of the same name.

    The hashed index file holds a checksum of every variable.
    """
    try:
        with tf.io.gfile.GFile(f"{path}.index", "rb") as file:
            digest = hashlib.sha256(file.read()).hexdigest()
    except tf.errors.NotFoundError:
        digest = ""
    return [os.path.basename(path), digest]
