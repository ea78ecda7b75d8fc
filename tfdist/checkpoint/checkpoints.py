"""Checkpoints that restore into a cluster of any shape."""

from __future__ import annotations

import collections
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures

import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.errors import summarize_error
from tfdist._tf.private_checkpoints import CheckpointTracedOnce, Saveable
from tfdist._tf.private_positions import (
    HeldPosition,
    OtherDatasetError,
    restore_position,
)
from tfdist.checkpoint import names
from tfdist.checkpoint.held import HeldValues, can_hold
from tfdist.checkpoint.names import load_variable as load_variable
from tfdist.checkpoint.names import named_variables as named_variables
from tfdist.checkpoint.names import saved_shapes as saved_shapes
from tfdist.checkpoint.names import step_of as step_of
from tfdist.training.finite import FiniteCheck, NonFiniteVariablesError

_log = logging.getLogger(__name__)

# Errors of an iterator whose position cannot be saved.
_NO_POSITION = (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError)
_WAYS_OUT = (
    'To continue, write `model_checkpoint_path: "model.ckpt-STEP"` (an intact '
    "one) to the list. To start over, move all away or use another model_dir."
)
_REHASH = (
    " To change the `capacity` of a DynamicEmbedding, run: tfdist rehash "
    "--checkpoint={} --capacity=TABLE=ROWS --output=NEW_MODEL_DIR"
)
BASENAME = "model.ckpt"
# The checkpoints that this process has found or saved, by directory.
_ours = collections.defaultdict[str, set[str | None]](set)
# The largest share of time that saving takes from concurrent steps.
_COST_BEHIND = 0.1


class Checkpoints:
    """The checkpoints of a job: `model_dir/model.ckpt-<step>`.

    A thin layer over `tf.train.Checkpoint` and `CheckpointManager`: each
    parameter server writes what it holds, in parallel.

    >>> variables = {"weight": tf.Variable(1.0)}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(step=7)
    >>> os.path.basename(path)
    'model.ckpt-7'

    Args:
        directory: The directory of the checkpoints.
        variables: Maps names to variables, as `named_variables` returns.
        max_to_keep: Recent checkpoints to keep; `None` or 0 keeps all.
        keep_every_n_hours: Also keeps one checkpoint every n hours.
        iterator_fn: Returns the input's iterator, whose position is saved too,
            or None. If the position cannot be saved, a warning says so.
        before_save: Called with the step before anything is saved.
        check_numerics: Whether to refuse to save values that are not finite.

    Attributes:
        position_restored: Whether the input's position was restored.
        optimizer_restored: Whether its state was restored; see `restore`.
        cost_secs: How long steps had to wait for the last save, or a tenth of
            the time during which it was written concurrently.
    """

    def __init__(
        self,
        directory: str,
        variables: Mapping[str, Saveable],
        max_to_keep: int | None = 5,
        keep_every_n_hours: float | None = None,
        iterator_fn: Callable[[], tf.data.Iterator | None] = lambda: None,
        before_save: Callable[[int], None] = lambda step: None,
        check_numerics: bool = True,
    ) -> None:
        _newest(directory)  # Raises if the list is damaged.
        self._directory = directory
        self._variables = variables = names.values_of(variables)
        self._keep = {
            "max_to_keep": max_to_keep or None,
            "keep_checkpoint_every_n_hours": keep_every_n_hours,
        }
        self._iterator_fn = iterator_fn
        self._before_save = before_save
        self.position_restored = False
        self.optimizer_restored = True
        self.cost_secs = 0.0
        self._writing: futures.Future[str] | None = None
        self._held = HeldValues(variables) if can_hold(variables) else None
        self._saved = self._held.variables if self._held else self._variables
        self._finite = FiniteCheck(self._saved) if check_numerics else None
        self._set_iterator(None)

    def _set_iterator(self, iterator: tf.data.Iterator | None) -> None:
        self._iterator, self._position = iterator, None
        parts = {}
        if iterator is not None:
            self._position = parts["iterator"] = HeldPosition(iterator)
        self._checkpoint = CheckpointTracedOnce(
            variables=dict(self._saved), **parts
        )
        self._manager = self._manager_of(self._checkpoint)

    def _manager_of(
        self, checkpoint: tf.train.Checkpoint
    ) -> tf.train.CheckpointManager:
        return tf.train.CheckpointManager(
            checkpoint, self._directory, checkpoint_name=BASENAME, **self._keep
        )

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, or None."""
        return self._manager.latest_checkpoint

    def prepare(self) -> None:
        """Traces in advance the functions that the first save needs."""
        self._set_iterator(self._iterator_fn())
        for part in (self._checkpoint, self._held, self._finite):
            if part:
                part.trace()

    def save(self, step: int) -> str:
        """Writes `model.ckpt-<step>` and returns its path.

        Raises:
            NonFiniteVariablesError: a variable is not finite.
            RuntimeError: another job has saved in the directory since.
        """
        return self.save_behind(step, behind=False).result()

    def save_behind(
        self, step: int, behind: bool = True
    ) -> futures.Future[str]:
        """Like `save`, but steps may continue while the checkpoint is written.

        Waits for the previous save, then holds the current values (see
        `HeldValues`) and returns. If the values do not `fit` twice, or have a
        copy per replica, it returns only after writing. The future's result is
        the path, or the error of `save` with the attribute `saved_step`.
        """
        self.wait()
        since = time.monotonic()
        self._hold_position()
        if self._held:
            self._held.hold()
        behind = behind and bool(self._held and self._held.fit())
        written: futures.Future[str] = futures.Future()

        def write() -> None:
            try:
                path = self._write(step)
                self.cost_secs = time.monotonic() - since
                self.cost_secs *= _COST_BEHIND if behind else 1
                written.set_result(path)
            except BaseException as error:  # For the caller of `result`.
                what = summarize_error(error)
                _log.warning("Failed to save step %d: %s", step, what)
                vars(error)["saved_step"] = step
                written.set_exception(error)

        if behind:
            threading.Thread(target=write, daemon=True).start()
        else:
            write()
        self._writing = written
        return written

    def wait(self, secs: float | None = None) -> bool:
        """Waits for the current save; returns whether it has ended."""
        begun = [self._writing] if self._writing else []
        return not futures.wait(begun, secs).not_done

    def _hold_position(self) -> None:
        if (iterator := self._iterator_fn()) is not self._iterator:
            self._set_iterator(iterator)
        if self._position is not None:
            try:
                self._position.hold()
            except _NO_POSITION as error:
                _log.warning(
                    "The position of the input cannot be saved: a restored job "
                    "will read it from the start. Reason: %s",
                    summarize_error(error),
                )
                self._iterator_fn = lambda: None
                self._set_iterator(None)

    def _write(self, step: int) -> str:
        """Writes the held values, or else the current ones."""
        try:
            self._check_finite(step)
            self._check_alone(step)
            self._before_save(step)
            path = self._manager.save(checkpoint_number=step)
        finally:
            for held in (self._held, self._position):
                if held is not None:
                    held.release()
        _log.info("Saved %s.", path)
        return path

    def _check_finite(self, step: int) -> None:
        found = self._finite.not_finite() if self._finite else []
        if found:
            raise NonFiniteVariablesError(
                f"At step {step} {len(found)} of {len(self._variables)} "
                f"variables hold NaN or infinite values: "
                f"{', '.join(found[:20])}. They are not saved; the last good "
                f"checkpoint is {self.latest}. Look for NaN among the "
                "features, and for a learning rate that is too large. To save "
                "such values nevertheless, set `check_numerics=False`."
            )

    def _check_alone(self, step: int) -> None:
        """Raises if another process has saved here since this one started."""
        ours = _ours[self._directory]
        ours |= {None, self.latest, *self._manager.checkpoints}
        if (newest := _newest(self._directory)) not in ours:
            raise RuntimeError(
                f"Another job saves in {self._directory!r}: {newest!r} is not "
                "from this job, which stops. Give each job its own model_dir."
            )
        ours.add(os.path.join(self._directory, f"{BASENAME}-{step}"))

    def remove_unfinished(self) -> None:
        """Removes the remains of killed saves; no save may be running."""
        for pattern in (f"{BASENAME}-*_temp*", "checkpoint.tmp*"):
            for path in tf.io.gfile.glob(f"{self._directory}/{pattern}"):
                storage.remove_tree(path)

    def restore(self, position_of: Callable[[str], str] = str) -> str | None:
        """Restores the newest intact checkpoint; returns its path, or None.

        The newest is the one named in the file `checkpoint`, which can be
        edited to go back to an earlier one, as in TF. If it is damaged, a
        warning says so, and the previous one is restored. `position_of` maps
        its path to the checkpoint of the input's position.

        Raises:
            ValueError: it holds other variables; every checkpoint is damaged;
                the list of checkpoints is damaged or missing.
        """
        paths = listed(self._directory)
        if not paths:
            _check_there_is_none(self._directory)
        for path, older in itertools.zip_longest(paths, paths[1:]):
            try:
                self.restore_from(path, position_of(path))
                return path
            except (tf.errors.OpError, IndexError, RuntimeError) as error:
                if not storage.is_damage(error):
                    raise
                if older is None:
                    raise ValueError(
                        f"Every checkpoint in {self._directory!r} is damaged: "
                        f"{paths}. Put an intact one there, or choose another "
                        "model_dir to start over."
                    ) from error
                _log.warning(
                    "Checkpoint %s is damaged; restoring %s instead. The error "
                    "from TensorFlow: %s",
                    path,
                    older,
                    str(error).splitlines()[0],
                )
        return None

    def save_position(self, step: int) -> None:
        """Writes only the input's position, if it can be saved."""
        self._hold_position()
        if self._position is not None:
            checkpoint = tf.train.Checkpoint(iterator=self._position)
            self._manager_of(checkpoint).save(checkpoint_number=step)
            self._position.release()

    def restore_from(self, path: str, position: str) -> None:
        """Restores a checkpoint, and the input's position from another."""
        self.optimizer_restored = restore(path, self._variables, exact=True)
        if not tf.io.gfile.exists(f"{position}.index"):
            return
        iterator = self._iterator_fn()
        try:
            if iterator is not None:
                self.position_restored = restore_position(iterator, position)
        except OtherDatasetError as error:
            _log.warning(
                "The position in %s belongs to a different input, so the input "
                "is read from the start. %s",
                position,
                error,
            )


def latest(directory: str) -> str | None:
    """Returns the path of the newest checkpoint in `directory`, or None.

    Like `tf.train.latest_checkpoint`, but raises an error if the directory
    (`OpError`) or the list of its checkpoints (`ValueError`) cannot be read,
    since a job would otherwise start over.

    >>> tfdist.checkpoint.latest(directory) is None
    True
    """
    path = _newest(directory)
    if path is None:
        _check_there_is_none(directory)
    return path


def listed(directory: str) -> list[str]:
    """Returns the checkpoints of `directory`, the newest first.

    If the list was edited to go back, starts with the one in its first line.
    """
    first = _newest(directory)
    state = tf.train.get_checkpoint_state(directory)
    paths = list(state.all_model_checkpoint_paths)[::-1] if state else []
    if first in paths:
        return paths[paths.index(first) :]
    return [first, *paths] if first else paths


def _check_there_is_none(directory: str) -> None:
    """Raises unless `directory` can be read and lists no checkpoint."""
    path = os.path.join(directory, "checkpoint")
    if storage.read_text(path):
        raise ValueError(
            f"None of the checkpoints listed in {path!r} can be found, or the "
            f"list is damaged. {_WAYS_OUT}"
        )
    # A job that was killed while it saved its first state has no list yet.
    later = os.path.join(directory, f"{BASENAME}-[1-9]*.index")
    if found := tf.io.gfile.glob(later):
        raise ValueError(
            f"{path!r}, the list of checkpoints, is missing, but there are "
            f"{sorted(found)}. A job would start at step 0 and overwrite them. "
            f"{_WAYS_OUT}"
        )


def _newest(directory: str) -> str | None:
    """Like `tf.train.latest_checkpoint`; names a list that names none."""
    try:
        return tf.train.latest_checkpoint(directory)
    except ValueError as error:
        raise ValueError(
            f"'{directory}/checkpoint', the list of checkpoints, is damaged: "
            f"{error}. {_WAYS_OUT}"
        ) from error


def restore(
    path: str, variables: Mapping[str, Saveable], exact: bool = False
) -> bool:
    """Assigns the values in checkpoint `path` to `variables`, by name.

    Either side may lack a learning rate, if the other has a schedule, and the
    counts of `DynamicEmbedding(admit_after=...)`, which then start at 0.

    Args:
        path: The path of the checkpoint.
        variables: Maps names to variables.
        exact: Whether the checkpoint must hold only `variables`. If slots
            differ because other variables were trained when it was saved, no
            value of an optimizer is restored.

    Returns:
        False if the values of optimizers were left out, otherwise True.

    Raises:
        ValueError: the variables differ; the message lists the differences.

    >>> saved, empty = tf.Variable(1.0), tf.Variable(0.0)
    >>> variables = {"weight": saved}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(1)
    >>> tfdist.checkpoint.restore(path, {"weight": empty})
    True
    >>> float(empty)
    1.0
    """
    saved, variables = saved_shapes(path), names.values_of(variables)
    others = names.changed_slots(saved, variables) if exact else set()
    left = others | names.optional_names(saved, variables)
    variables = {n: v for n, v in variables.items() if n not in left}
    saved = {n: shape for n, shape in saved.items() if n not in left}
    problems = [
        f"  {name}: shape {v.shape} in the model, "
        + (f"{tuple(saved[name])}" if name in saved else "missing")
        + " in the checkpoint"
        for name, v in variables.items()
        if name not in saved or not v.shape.is_compatible_with(saved[name])
    ]
    problems += names.other_dtypes(path, variables)
    problems += [
        f"  {name}: missing in the model, shape {tuple(shape)} in the "
        "checkpoint"
        for name, shape in saved.items()
        if exact and name not in variables
    ]
    if problems:
        grown = any("/seen: shape" in problem for problem in problems)
        rehash = _REHASH.format(path) if grown else ""
        raise ValueError(
            f"Checkpoint {path} does not fit the model:\n"
            + "\n".join(problems)
            + "\nIt was written by a different model function. Use the "
            "matching code, or choose another model_dir and load only the "
            "weights, with Estimator(warm_start_from=...)." + rehash
        )
    checkpoint = tf.train.Checkpoint(variables=dict(variables))
    checkpoint.restore(path).expect_partial()
    if others:
        _log.warning(
            "%s was saved by a job that trained other variables. The weights "
            "are restored; the optimizer starts over, as after `compile`.",
            path,
        )
    return not others
