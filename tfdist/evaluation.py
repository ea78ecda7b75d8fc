"""Evaluates checkpoints, on a machine of its own (design decision D8).

The evaluator is no member of the training cluster. It rebuilds the model in
its own process, without a strategy, and reads checkpoints by variable name.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfdist import checkpoint
from tfdist._private import reset_object_names
from tfdist.events import event_file
from tfdist.exporters import Exporter
from tfdist.step import ModelStep

_log = logging.getLogger(__name__)

RESULT_FILE = "latest.json"
_POLL_SECS = 0.5
# Seconds between the chief's reminders, while it waits, that it is done.
_REMIND_SECS = 5.0


class Evaluator:
    """Evaluates and exports the checkpoints of one job.

    Args:
        model_fn: Returns the compiled model.
        input_fn: Returns the dataset, one pass over which is an evaluation.
        model_dir: Where the checkpoints are.
        steps: Batches an evaluation reads at most; None for all.
        name: Results go to `<model_dir>/eval`, or `eval_<name>`.
        exporters: Run after each evaluation.
    """

    def __init__(
        self,
        model_fn: Callable[[], keras.Model],
        input_fn: Callable[[], tf.data.Dataset],
        model_dir: str,
        *,
        steps: int | None = None,
        name: str | None = None,
        exporters: Sequence[Exporter] = (),
    ) -> None:
        self._model_dir = model_dir
        self._exporters = list(exporters)
        self._steps = steps
        self._input_fn = input_fn
        self._model_fn = model_fn
        self.eval_dir = eval_dir(model_dir, name)
        self._step: ModelStep | None = None
        self.evaluated: str | None = None
        self.metrics: dict[str, float] = {}
        self.exports: list[str | None] = []

    def evaluate(self, path: str | None) -> dict[str, float]:
        """Metrics of checkpoint `path`, `loss` and `global_step` among them.

        Without one, of the model as it is initialized.
        """
        dataset = self._input_fn()
        if self._steps is not None:
            dataset = dataset.take(self._steps)
        self._build(dataset.element_spec)
        if path:
            variables = checkpoint.named_variables(
                self._step.model, optimizer=False
            )
            checkpoint.restore(path, variables)
        states = self._step.zero_states()
        for batch in dataset:
            states = self._evaluate_batch(batch, states)
        self.metrics = self._step.result(self._step.pack(states).numpy())
        if not self.metrics:
            raise ValueError("The evaluation input has no batch.")
        self.metrics["global_step"] = checkpoint.step_of(path) if path else 0
        self.evaluated = path
        self._report()
        return self.metrics

    def export(self, is_the_final_export: bool) -> list[str | None]:
        """Runs the exporters on the evaluated model."""
        self.exports = [
            exporter.export(
                self._step.model,
                os.path.join(self._model_dir, "export", exporter.name),
                self.metrics,
                is_the_final_export,
            )
            for exporter in self._exporters
        ]
        return self.exports

    def run_continuously(
        self,
        max_steps: int | None,
        start_delay_secs: float,
        throttle_secs: float,
    ) -> None:
        """Evaluates each newest checkpoint until the last of the job.

        Only new checkpoints, and only the newest; the last one without delay.

        Args:
            max_steps: Step of the last checkpoint; None for when the chief
                says that it is done.
            start_delay_secs: Seconds before the first evaluation.
            throttle_secs: Least seconds between the starts of two evaluations.
        """
        done_before = _read_json(done_path(self._model_dir))
        not_before = time.monotonic() + start_delay_secs
        last_step = max_steps
        while True:
            done = _read_json(done_path(self._model_dir))
            if done is not None and done != done_before:
                last_step = done["global_step"]
            path = tf.train.latest_checkpoint(self._model_dir)
            if path and path != self.evaluated:
                now = time.monotonic()
                if self._take(path, last_step, at_once=now >= not_before):
                    not_before = now + throttle_secs
            elif path and _is_last(self.metrics["global_step"], last_step):
                return
            time.sleep(_POLL_SECS)

    def _take(self, path: str, last_step: int | None, at_once: bool) -> bool:
        """Evaluates and exports `path` if it is time to; says whether it did.

        The last checkpoint waits for nothing. One that is deleted while it is
        read was an old one: the next look finds a newer one.
        """
        try:
            final = _is_last(checkpoint.step_of(path), last_step)
            if not (final or at_once):
                return False
            self.evaluate(path)
        except tf.errors.OpError:
            if tf.io.gfile.exists(f"{path}.index"):
                raise
            _log.warning(
                "%s was deleted before it was evaluated. "
                "RunConfig(keep_checkpoint_max=...) keeps more of them.",
                path,
            )
            return False
        self.export(final)
        self.publish()
        return True

    def publish(self) -> None:
        """Leaves the result where the chief and the user find it."""
        write_json(
            os.path.join(self.eval_dir, RESULT_FILE),
            {"metrics": self.metrics, "exports": self.exports},
        )

    def _build(self, element_spec: object) -> None:
        if self._step is not None:
            return
        reset_object_names()
        self._step = ModelStep(self._model_fn(), element_spec)
        self._evaluate_batch = tf.function(
            self._step.evaluate, reduce_retracing=True
        )
        self._writer = event_file(self.eval_dir)

    def _report(self) -> None:
        step = self.metrics["global_step"]
        scalars = {k: v for k, v in self.metrics.items() if k != "global_step"}
        self._writer.write_scalars(scalars, step)
        self._writer.flush()
        _log.info(
            "Evaluation of step %d: %s",
            step,
            ", ".join(f"{k} {v:.4f}" for k, v in scalars.items()),
        )


def _is_last(step: int, last_step: int | None) -> bool:
    return last_step is not None and step >= last_step


def eval_dir(model_dir: str, name: str | None) -> str:
    """Where the evaluation called `name` writes."""
    return os.path.join(model_dir, f"eval_{name}" if name else "eval")


def done_path(model_dir: str) -> str:
    """File in which the chief says that training is over."""
    return os.path.join(model_dir, "training_done.json")


def announce_end(model_dir: str, step: int) -> None:
    """Tells the evaluator that training is over, at `step`."""
    write_json(done_path(model_dir), {"global_step": step, "time": time.time()})


def wait_for_result(
    model_dir: str, name: str | None, step: int, timeout_secs: float
) -> dict | None:
    """Waits until the evaluator has published its result for `step`.

    Repeats meanwhile that training is over: an evaluator that starts only now
    cannot tell an announcement it finds from one of an earlier job.

    Args:
        model_dir: Where the checkpoints are.
        name: Name of the evaluation.
        step: The last step of the job.
        timeout_secs: Seconds to wait at most.

    Returns:
        `{"metrics": ..., "exports": ...}`, or None if none came in time.
    """
    start = time.monotonic()
    path = os.path.join(eval_dir(model_dir, name), RESULT_FILE)
    reminders = 0
    while (waited := time.monotonic() - start) < timeout_secs:
        result = _read_json(path)
        if result and result["metrics"]["global_step"] >= step:
            announce_end(model_dir, step)
            return result
        if waited >= (reminders + 1) * _REMIND_SECS:
            announce_end(model_dir, step)
            if reminders % 6 == 0:
                _log.info(
                    "Waiting for the evaluator's result of step %d.", step
                )
            reminders += 1
        time.sleep(_POLL_SECS)
    _log.warning(
        "The evaluator published no result for step %d within %g s; the job "
        "ends without it. RunConfig(evaluator_timeout_secs=...) sets the "
        "limit.",
        step,
        timeout_secs,
    )
    return None


def write_json(path: str, value: object) -> None:
    """Writes a file that is never seen half-written."""
    tf.io.gfile.makedirs(os.path.dirname(path))
    temporary = f"{path}.temp"
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(json.dumps(value))
    tf.io.gfile.rename(temporary, path, overwrite=True)


def _read_json(path: str) -> dict | None:
    try:
        with tf.io.gfile.GFile(path) as file:
            return json.loads(file.read())
    except tf.errors.NotFoundError:
        return None
