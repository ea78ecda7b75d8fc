"""When to export an evaluated model, and which exports to keep."""

from __future__ import annotations

import inspect
import logging
import math
import os
import re
from collections.abc import Callable, Mapping

import keras

from tfdist._tf import storage
from tfdist._tf.arguments import check_at_least, check_callable, check_one_of
from tfdist._tf.tf1_arguments import tf1_arguments
from tfdist.estimator import results, saved_models
from tfdist.estimator.saved_models import ServingModelFn, list_exports

_log = logging.getLogger(__name__)

_BEST_FILE = "best.json"

Metrics = dict[str, float]
CompareFn = Callable[..., bool]


class Exporter:
    """Base class of exporters.

    Unlike `tf.estimator.Exporter`, it gets the evaluated Keras model instead of
    an estimator and a checkpoint path; `serving_model_fn` replaces
    `serving_input_receiver_fn`, and there is no `as_text`. As in TF, an error
    in `export` ends the evaluator task, or the chief if that evaluates. Earlier
    exports are kept, and no partial export is left behind.

    >>> class PrintingExporter(tfdist.Exporter):
    ...     def export(
    ...         self, model, export_path, eval_result, is_the_final_export
    ...     ):
    ...         print(f"{self.name}: loss {eval_result['loss']}")
    >>> PrintingExporter("shown").export(None, "", {"loss": 0.5}, False)
    shown: loss 0.5

    Args:
        name: Directory under `<model_dir>/export`.
        serving_model_fn: Maps the trained model to the object to export: a
            Keras model, for example with preprocessing and named outputs, or
            a `tfdist.Serving`. Default: the result of the model's `serving()`
            method if it has one (canned models do), else the model itself.
        assets_extra: Files to copy into the SavedModel's `assets.extra`: maps
            relative destination paths to source paths.
        format: What to write into the numbered directory: "saved_model";
            "keras", a `model.keras` for `keras.models.load_model`, with
            `PartitionedEmbedding` tables unpartitioned (not for canned or
            other models without `get_config`); or "weights", a
            `model.weights.h5` for `Model.load_weights`. The last two hold the
            model itself unless `serving_model_fn` is given.

    Raises:
        ValueError: `name` is not a plain directory name; a destination of
            `assets_extra` is absolute or outside of the directory; an unknown
            `format`.
        TypeError: `serving_model_fn` is not callable, or `assets_extra` is not
            a dictionary of strings.
    """

    @tf1_arguments
    def __init__(
        self,
        name: str,
        serving_model_fn: ServingModelFn | None = None,
        assets_extra: Mapping[str, str] | None = None,
        format: str = "saved_model",
    ) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]*[\w-]", name):
            raise ValueError(
                "Argument `name` must be a directory name: letters, digits, "
                f"'_', '-', '.'. Received: name={name!r}."
            )
        if serving_model_fn is not None:
            check_callable(
                "serving_model_fn", serving_model_fn, "the trained model"
            )
        check_one_of("format", format, saved_models.FORMATS)
        self.name = name
        self._format = format
        self._serving_model_fn = serving_model_fn
        self._assets_extra = saved_models.checked_assets(assets_extra)
        self._exports_to_keep: int | None = None

    def export(
        self,
        model: keras.Model,
        export_path: str,
        eval_result: Metrics,
        is_the_final_export: bool,
    ) -> str | None:
        """Exports `model` under `export_path` if an export is due.

        Args:
            model: The model with the evaluated weights.
            export_path: `<model_dir>/export/<name>`.
            eval_result: Metrics of the evaluation.
            is_the_final_export: Whether training is over.

        Returns:
            The directory of the export of this checkpoint, or None.

        Raises:
            ValueError: `format="keras"` for a model without `get_config`; even
                if no export is due, unless there is a `serving_model_fn`.
        """
        if self._format == "keras" and self._serving_model_fn is None:
            saved_models.check_has_config(model)  # Fail early, not at the end.
        if not self._is_due(export_path, eval_result, is_the_final_export):
            return self._earlier(export_path, eval_result)
        options = self._serving_model_fn, self._assets_extra, self._format
        path = saved_models.export_saved_model(model, export_path, *options)
        self._exported(path, eval_result)
        if self._exports_to_keep is not None:
            for old in list_exports(export_path)[: -self._exports_to_keep]:
                storage.remove_tree(old)
        return path

    def _is_due(self, export_path: str, result: Metrics, at_end: bool) -> bool:
        """Whether to export the model that has just been evaluated."""
        raise NotImplementedError

    def _earlier(self, export_path: str, result: Metrics) -> str | None:
        """The export by a process that ended before it could return it."""
        return None

    def _exported(self, path: str, result: Metrics) -> None:
        """Called with the directory of each new export."""


class FinalExporter(Exporter):
    """Exports once, when training has ended.

    >>> tfdist.FinalExporter("serving").name
    'serving'
    """

    def _is_due(self, export_path: str, result: Metrics, at_end: bool) -> bool:
        return at_end


class LatestExporter(Exporter):
    """Exports after every evaluation and keeps the most recent exports.

    >>> exporter = tfdist.LatestExporter("serving", exports_to_keep=2)

    Args:
        name: See `Exporter`, also for the other arguments.
        exports_to_keep: Number of exports to keep, at least 1; None keeps all.
    """

    @tf1_arguments
    def __init__(
        self,
        name: str,
        serving_model_fn: ServingModelFn | None = None,
        exports_to_keep: int | None = 5,
        assets_extra: Mapping[str, str] | None = None,
        format: str = "saved_model",
    ) -> None:
        super().__init__(name, serving_model_fn, assets_extra, format)
        check_at_least("exports_to_keep", exports_to_keep, 1)
        self._exports_to_keep = exports_to_keep

    def _is_due(self, export_path: str, result: Metrics, at_end: bool) -> bool:
        return True


def loss_smaller(
    best_eval_result: Metrics, current_eval_result: Metrics
) -> bool:
    """Whether the current loss is smaller; NaN is worse than any number.

    >>> loss_smaller({"loss": 0.5}, {"loss": 0.5})
    False

    Raises ValueError if one of the results has no loss.
    """
    for name, result in (
        ("best_eval_result", best_eval_result),
        ("current_eval_result", current_eval_result),
    ):
        if "loss" not in result:
            raise ValueError(
                f"Argument `{name}` must have a 'loss'. Received: "
                f"{name}={result}. Pass BestExporter a `compare_fn` that "
                "compares another metric."
            )
    best, current = best_eval_result["loss"], current_eval_result["loss"]
    return current < best or (math.isnan(best) and not math.isnan(current))


class BestExporter(LatestExporter):
    """Exports when an evaluation is the best so far; keeps the most recent.

    The first evaluation is always exported. `best.json`, next to the exports,
    records the best result for restarted evaluators and resumed jobs, in place
    of TF's `event_file_pattern`. Delete `<model_dir>/export/<name>` to start
    over.

    >>> exporter = BestExporter(
    ...     "best_auc",
    ...     compare_fn=lambda best_eval_result, current_eval_result: (
    ...         current_eval_result["auc"] > best_eval_result["auc"]))

    Args:
        name: See `Exporter`, also for the other arguments.
        compare_fn: Takes the arguments `best_eval_result` and
            `current_eval_result`, dictionaries of metrics by name that include
            `global_step`, and returns whether the current one is better.
            Default: whether its loss is smaller.
        exports_to_keep: Number of exports to keep, at least 1; None keeps all.

    Raises:
        ValueError: `compare_fn` is None or has different arguments.
        TypeError: `compare_fn` is not callable.
    """

    @tf1_arguments
    def __init__(
        self,
        name: str = "best_exporter",
        serving_model_fn: ServingModelFn | None = None,
        compare_fn: CompareFn = loss_smaller,
        exports_to_keep: int | None = 5,
        assets_extra: Mapping[str, str] | None = None,
        format: str = "saved_model",
    ) -> None:
        super().__init__(
            name, serving_model_fn, exports_to_keep, assets_extra, format
        )
        if compare_fn is None:
            raise ValueError("Argument `compare_fn` must not be None.")
        check_callable("compare_fn", compare_fn)
        names = set(inspect.signature(compare_fn).parameters)
        wanted = {"best_eval_result", "current_eval_result"}
        if names != wanted:  # They are passed by keyword.
            raise ValueError(
                "Argument `compare_fn` must have the arguments "
                "`best_eval_result` and `current_eval_result`. Missing: "
                f"{sorted(wanted - names)}; not expected: "
                f"{sorted(names - wanted)}."
            )
        self._compare_fn = compare_fn

    def _is_due(self, export_path: str, result: Metrics, at_end: bool) -> bool:
        noted = results.read_json(os.path.join(export_path, _BEST_FILE))
        if not noted or not list_exports(export_path):
            return True
        best = noted["best_eval_result"]
        try:
            is_better = self._compare_fn(
                best_eval_result=best, current_eval_result=result
            )
        except KeyError as error:
            error.add_note(
                f"The best model in {export_path!r} has the metrics {best}, "
                f"this one {result}. If the model's metrics have changed, "
                "delete that directory to start over."
            )
            raise
        if not is_better:
            _log.info(
                "Not exported to %s: the model of step %d was as good or "
                "better, %s. If it was evaluated with another loss or on other "
                "data, delete that directory to start over.",
                export_path,
                best.get("global_step", 0),
                best,
            )
        return is_better

    def _earlier(self, export_path: str, result: Metrics) -> str | None:
        noted = results.read_json(os.path.join(export_path, _BEST_FILE))
        is_best = noted is not None and noted["best_eval_result"] == result
        is_this = is_best and "global_step" in result
        return list_exports(export_path)[-1] if is_this else None

    def _exported(self, path: str, result: Metrics) -> None:
        numbers = {name: float(value) for name, value in result.items()}
        best = os.path.join(os.path.dirname(path), _BEST_FILE)
        results.write_json(best, {"best_eval_result": numbers})
        _log.info("Best model so far exported to %s: %s", path, result)
