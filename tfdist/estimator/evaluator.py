"""Evaluates checkpoints in a separate task.

The evaluator rebuilds the model in its own process, without a strategy, and
reads checkpoints by variable name. The cost of each failure:

The evaluator dies: once restarted, it continues with the newest checkpoint.
  Results already published are not recomputed; a missing final export is
  written, and a partial export is removed. At the end the chief waits for the
  evaluator for at most `evaluator_timeout_secs`.
The evaluator raises an error (no batch, a failing hook or exporter): like
  `tf.estimator`'s, its process exits with the error, and records the error in
  `<eval_dir>/failure.json`; the launcher may restart it. A chief that waits for
  the result logs the error within a second; after the third error, or a minute
  after one without a restart, the chief ends without the result.
The evaluator restarts after the chief has exited: it accepts an announced end
  of training after `patience_secs`, completes missing results, and exits.
The evaluator never starts: the chief ends after `evaluator_timeout_secs`.
The newest checkpoint is damaged: a warning, and the previous one is evaluated,
  unless it already was; an error, as above, if it is the job's last one.
A checkpoint is deleted before it is read: a warning; a newer one exists.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf import storage
from tfdist.checkpoint import checkpoints
from tfdist.data.input_fns import check_batches, named, without_context
from tfdist.estimator import results, saved_models
from tfdist.estimator.building import ModelFn
from tfdist.estimator.evaluation import Evaluation
from tfdist.estimator.results import DamagedCheckpointError
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.specs import EvalSpec
from tfdist.estimator.warm_start import WarmStartHook
from tfdist.hooks.events import event_file
from tfdist.training.compiled_model import overrides

_log = logging.getLogger(__name__)


class Evaluator:
    """Evaluates and exports the checkpoints of one job.

    As in `tf.estimator`, hooks are called around each batch of each evaluation.
    Their session is an `EvaluationSession`; their logs are the loss and metrics
    so far.

    Attributes:
        spec: What to evaluate on.
        eval_dir: Directory of the results.
        evaluated: Path of the checkpoint evaluated last.
        result: The `metrics` of that checkpoint, the `exports` returned by the
            `exporters` (by name), the identity of the `checkpoint`, and whether
            it is the `final` one; published in `<eval_dir>/latest.json`.
    """

    def __init__(
        self,
        model_fn: ModelFn,
        config: RunConfig,
        spec: EvalSpec,
        warm_start: WarmStartHook | None = None,
    ) -> None:
        self.spec = spec
        self._model_dir = config.model_dir
        self._evaluation = Evaluation(model_fn, spec, warm_start)
        self.eval_dir = results.eval_dir(self._model_dir, spec.name)
        self._result_path = os.path.join(self.eval_dir, results.RESULT_FILE)
        directory = config.summary_dir or config.model_dir
        self._summaries = results.eval_dir(directory, spec.name)
        self._element_spec: Any = None  # Until the dataset has been created.
        self.evaluated: str | None = None
        self.result: dict[str, Any] = {}
        self._damaged: set[str] = set()

    def evaluate(
        self,
        path: str | None,
        elsewhere: Callable[[tf.data.Dataset], dict[str, float]] | None = None,
    ) -> dict[str, float]:
        """Returns the metrics of checkpoint `path`, or of an initialized model.

        `elsewhere` computes the metrics without loading the checkpoint here. It
        is not used with hooks; if it returns none, they are computed here.
        """
        dataset = self._dataset()
        self.check_ends(dataset)
        if self.spec.steps is not None:
            dataset = dataset.take(self.spec.steps)
        identity = results.identity_of(path) if path else None
        metrics: dict[str, float] = {}
        with named(self.spec.input_fn):
            if elsewhere and not self.spec.hooks:
                assert path is not None
                metrics, step = elsewhere(dataset), checkpoints.step_of(path)
                # `path` may have been overwritten.
                self._evaluation.forget(dataset.element_spec)
            if not metrics:
                metrics, step = self._evaluation.run(dataset, path)
        if not (path or self._evaluation.is_given):
            results.warn_of_untrained(self._model_dir)
        if not metrics:
            raise ValueError(
                "There is no batch to evaluate: the `input_fn` of the EvalSpec "
                f"with results in {self.eval_dir!r} returned an empty dataset, "
                "or a hook stopped before the first batch. Are its files "
                "empty, or smaller than one batch with drop_remainder=True?"
            )
        event_file(self._summaries).write(step, metrics)
        text = ", ".join(f"{k} {v:.4f}" for k, v in metrics.items())
        _log.info("Evaluation of step %d: %s", step, text)
        metrics = {**metrics, "global_step": step}
        self.evaluated = path
        self.result = {"metrics": metrics, "checkpoint": identity}
        self._forget_exports()
        return metrics

    def _forget_exports(self) -> None:
        names = [exporter.name for exporter in self.spec.exporters]
        nothing = {"exports": [None] * len(names), "final": False}
        self.result.update(nothing, exporters=names)

    def check_input(self, model: keras.Model) -> None:
        """Raises `ValueError` if an evaluation would fail or never end."""
        if self._element_spec is None:
            self.check_ends(self._dataset())
        has_loss = not overrides(model, "test_step")
        with named(self.spec.input_fn):
            check_batches(model, self._element_spec, targets=has_loss)

    def _dataset(self) -> tf.data.Dataset:
        dataset = without_context(self.spec.input_fn)()
        self._element_spec = dataset.element_spec
        return dataset

    def check_ends(self, dataset: tf.data.Dataset | None = None) -> None:
        """Raises `ValueError` if an evaluation would never end."""
        if self.spec.steps is not None or self.spec.hooks:  # A hook may stop.
            return
        dataset = dataset or self._dataset()
        if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "The `input_fn` of the evaluation whose results go to "
                f"{self.eval_dir!r} returned a dataset that never ends, and "
                "`steps` is None, for all of it. Set `steps`, or leave out "
                "`repeat()`."
            )

    def export(self, is_the_final_export: bool) -> None:
        """Runs the exporters on the evaluated model, and publishes the result.

        If an exporter writes nothing, the path of its earlier export of this
        checkpoint, if any, remains in the result.
        """
        for i, exporter in enumerate(self.spec.exporters):
            path = exporter.export(
                self._evaluation.model(self.evaluated),
                self._export_path(exporter.name),
                self.result["metrics"],
                is_the_final_export,
            )
            if path:
                self.result["exports"][i] = os.fsdecode(path)
        self.result["final"] = is_the_final_export
        results.write_json(self._result_path, self.result)

    def _export_path(self, name: str) -> str:
        return os.path.join(self._model_dir, "export", name)

    def begin(self) -> None:
        """Removes exports that an earlier process of this job was writing."""
        for exporter in self.spec.exporters:
            saved_models.remove_abandoned(self._export_path(exporter.name))

    # --- The evaluator task --------------------------------------------------

    def run_continuously(
        self, max_steps: int | None, patience_secs: float = 600.0
    ) -> None:
        """Evaluates the newest checkpoints until the last one of the job.

        Results that an earlier process has published are reused; delete
        `<eval_dir>/latest.json` to evaluate that checkpoint again.

        Args:
            max_steps: Step of the last checkpoint; None: until the chief
                announces the end of training.
            patience_secs: Seconds to wait for a starting chief to retract an
                end of training that an earlier chief announced.
        """
        storage.check_writable(self._model_dir)
        failure = os.path.join(self.eval_dir, results.FAILURE_FILE)
        if tf.io.gfile.exists(failure):
            tf.io.gfile.remove(failure)  # This process replaces the failed one.
        try:
            self.check_ends()
            self.begin()
            self._resume()
            self._follow(max_steps, patience_secs)
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            results.write_json(failure, {"error": text, "time": time.time()})
            raise

    def _resume(self) -> None:
        """Resumes from the result an earlier process of this task published."""
        result = results.read_json(self._result_path)
        if not result or not result["checkpoint"]:
            return
        self.result = result
        self.evaluated = os.path.join(self._model_dir, result["checkpoint"][0])
        _log.info(
            "Evaluation resumes after checkpoint %s. If the metrics or the "
            "data have changed since, delete %s and restart the evaluator.",
            self.evaluated,
            self._result_path,
        )
        if result["exporters"] != [e.name for e in self.spec.exporters]:
            self._forget_exports()

    def _follow(self, max_steps: int | None, patience_secs: float) -> None:
        done_path = results.done_path(self._model_dir)
        done_before = results.read_json(done_path)
        start = time.monotonic()
        not_before = start + self.spec.start_delay_secs
        while True:
            now = time.monotonic()
            done = results.read_json(done_path)
            new = done != done_before or now >= start + patience_secs
            last_step = done["global_step"] if done and new else max_steps
            paths = checkpoints.listed(self._model_dir)
            # From the name, because the checkpoint may be damaged.
            newest = int(paths[0].rpartition("-")[2]) if paths else -1
            if last_step is not None and newest >= last_step:
                self._finish(paths[0])
                return
            path = next((p for p in paths if p not in self._damaged), None)
            if (
                path
                and now >= not_before
                and not self.has_evaluated(path)
                and self._evaluate_newest(path)
            ):
                not_before = now + self.spec.throttle_secs
            time.sleep(results.poll_secs(self._model_dir))

    def _evaluate_newest(self, path: str) -> bool:
        """Evaluates and exports a checkpoint; returns whether it could."""
        try:
            self.evaluate(path)
        except DamagedCheckpointError as error:
            if path in checkpoints.listed(self._model_dir):
                self._damaged.add(path)
                _log.warning("%s It is skipped.", error)
            else:
                _log.warning(
                    "%s was deleted before it was evaluated. To keep more, "
                    "raise RunConfig(keep_checkpoint_max=...).",
                    path,
                )
            return False
        self.export(is_the_final_export=False)
        return True

    def _finish(self, path: str) -> None:
        """Evaluates and exports the last checkpoint, unless already done."""
        try:
            if not self.has_evaluated(path):
                self.evaluate(path)
            elif self.result["final"]:
                return
        except DamagedCheckpointError as error:
            raise DamagedCheckpointError(
                f"{error} It is the job's last checkpoint, so there is no "
                "final evaluation or export. Resume training from the one "
                "before it (with a larger max_steps), or pass that one as "
                "`checkpoint_path` to Estimator.evaluate and "
                "Estimator.export_saved_model."
            ) from error.__cause__
        self.export(is_the_final_export=True)

    def has_evaluated(self, path: str) -> bool:
        """Whether the result is of the current contents of `path`."""
        return self.result.get("checkpoint") == results.identity_of(path)

    def has_published(self, path: str) -> bool:
        """Whether the latest published result is of checkpoint `path`."""
        published = results.read_json(self._result_path) or {}
        return published.get("checkpoint") == results.identity_of(path)
