"""SavedModels from an evaluated model: `<model_dir>/export/<name>/<time>/`.

Which signatures they have is `tfdist.serving`'s matter. A directory appears
under its final name when it is complete, and TensorFlow Serving takes the one
with the largest number; an export that fails leaves nothing behind. (On an
object store, where a directory cannot be renamed at once, `saved_model.pb`
arrives after the files it needs.)
"""

from __future__ import annotations

import inspect
import json
import logging
import math
import os
import re
import time
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from tfdist import serving
from tfdist.serving import Serving

_log = logging.getLogger(__name__)

ServingModelFn = Callable[[keras.Model], keras.Model | Serving]
CompareFn = Callable[[dict[str, float], dict[str, float]], bool]

_BEST_FILE = "best.json"
# Seconds after which a temporary directory belongs to a process that died.
_ABANDONED_SECS = 3600
_ATTEMPTS = 10


class Exporter:
    """Base of exporters: a name and what to export.

    Differs from `tf.estimator.Exporter`: it gets the evaluated Keras model
    instead of an estimator and a checkpoint path, and `serving_model_fn`
    replaces `serving_input_receiver_fn`. There is no `as_text`.

    Args:
        name: Directory under `<model_dir>/export`.
        serving_model_fn: From the trained model to what to export: a Keras
            model, for example with preprocessing in front and named outputs,
            or a `tfdist.Serving`. Default: the model itself; what its method
            `serving()` returns, if it has one (the canned models do).
        assets_extra: Files to copy into the SavedModel's `assets.extra`:
            path there (relative) to path of the source.

    Raises:
        ValueError: `name` is empty or no plain directory name; a destination
            of `assets_extra` is absolute or leads elsewhere.
        TypeError: `serving_model_fn` is not callable, `assets_extra` no
            dictionary of strings.
    """

    def __init__(
        self,
        name: str,
        serving_model_fn: ServingModelFn | None = None,
        assets_extra: Mapping[str, str] | None = None,
    ) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                "Argument `name` must be a directory name: letters, digits, "
                f"'_', '-', '.'. Received: name={name!r}."
            )
        _check_serving_model_fn(serving_model_fn)
        self.name = name
        self._serving_model_fn = serving_model_fn
        self._assets_extra = _checked_assets(assets_extra)

    def export(
        self,
        model: keras.Model,
        export_path: str,
        eval_result: dict[str, float],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports `model` under `export_path` if it is time to.

        Args:
            model: The model with the evaluated weights.
            export_path: `<model_dir>/export/<name>`.
            eval_result: Metrics of the evaluation.
            is_the_final_export: Whether training is over.

        Returns:
            The directory of the SavedModel, or None.
        """
        raise NotImplementedError

    def _write(self, model: keras.Model, export_path: str) -> str:
        return export_saved_model(
            model, export_path, self._serving_model_fn, self._assets_extra
        )


class FinalExporter(Exporter):
    """Exports once, when training is over."""

    def export(
        self,
        model: keras.Model,
        export_path: str,
        eval_result: dict[str, float],
        is_the_final_export: bool,
    ) -> str | None:
        """See `Exporter.export`."""
        if not is_the_final_export:
            return None
        return self._write(model, export_path)


class LatestExporter(Exporter):
    """Exports after every evaluation and keeps the newest few.

    Args:
        name: See `Exporter`.
        serving_model_fn: See `Exporter`.
        exports_to_keep: How many; `None` keeps all.
        assets_extra: See `Exporter`.

    Raises:
        ValueError: `exports_to_keep` is not positive.
    """

    def __init__(
        self,
        name: str,
        serving_model_fn: ServingModelFn | None = None,
        exports_to_keep: int | None = 5,
        assets_extra: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, serving_model_fn, assets_extra)
        _check_exports_to_keep(exports_to_keep)
        self._exports_to_keep = exports_to_keep

    def export(
        self,
        model: keras.Model,
        export_path: str,
        eval_result: dict[str, float],
        is_the_final_export: bool,
    ) -> str | None:
        """See `Exporter.export`."""
        path = self._write(model, export_path)
        _keep_newest(export_path, self._exports_to_keep)
        return path


def loss_smaller(
    best_eval_result: dict[str, float], current_eval_result: dict[str, float]
) -> bool:
    """Whether the current loss is less than the best: a `compare_fn`.

    A loss that is no number is worse than any.

    >>> loss_smaller({"loss": 0.5}, {"loss": 0.4})
    True
    >>> loss_smaller({"loss": 0.5}, {"loss": 0.5})
    False

    Raises:
        ValueError: one of the results has no loss.
    """
    for name, result in (
        ("best_eval_result", best_eval_result),
        ("current_eval_result", current_eval_result),
    ):
        if not result or "loss" not in result:
            raise ValueError(
                f"{name} cannot be empty or no loss is found in it. Received: "
                f"{name}={result}. Give BestExporter a `compare_fn` that "
                "compares another metric."
            )
    best, current = best_eval_result["loss"], current_eval_result["loss"]
    return current < best or (math.isnan(best) and not math.isnan(current))


class BestExporter(Exporter):
    """Exports when an evaluation is better than all before, keeps the newest.

    The first evaluation is always exported. What the best one was is written
    beside the exports (`best.json`), after the export itself: a restarted
    evaluator, or a job that trains on, goes on comparing with it, and a
    process that dies in between exports the same model once more, never a
    worse one. `tf.estimator.BestExporter` read events files for this and
    forgot after a restart; so there is no `event_file_pattern`. Without an
    export left beside it the file is ignored: delete the directory
    `<model_dir>/export/<name>` to begin anew.

    >>> exporter = tfdist.BestExporter(
    ...     "best_auc",
    ...     compare_fn=lambda best_eval_result, current_eval_result: (
    ...         current_eval_result["auc"] > best_eval_result["auc"]))

    Args:
        name: See `Exporter`.
        serving_model_fn: See `Exporter`.
        compare_fn: Takes the arguments `best_eval_result` and
            `current_eval_result`, both metrics by name (`global_step` among
            them), and says whether the current one is better. Default:
            `loss_smaller`.
        exports_to_keep: How many; `None` keeps all.
        assets_extra: See `Exporter`.

    Raises:
        ValueError: `exports_to_keep` is not positive, `compare_fn` is None or
            has other arguments.
        TypeError: `compare_fn` is not callable.
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_model_fn: ServingModelFn | None = None,
        compare_fn: CompareFn = loss_smaller,
        exports_to_keep: int | None = 5,
        assets_extra: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, serving_model_fn, assets_extra)
        _check_compare_fn(compare_fn)
        _check_exports_to_keep(exports_to_keep)
        self._compare_fn = compare_fn
        self._exports_to_keep = exports_to_keep

    def export(
        self,
        model: keras.Model,
        export_path: str,
        eval_result: dict[str, float],
        is_the_final_export: bool,
    ) -> str | None:
        """See `Exporter.export`."""
        best = _read_best(export_path)
        if best is not None and not self._compare_fn(
            best_eval_result=best, current_eval_result=eval_result
        ):
            return None
        path = self._write(model, export_path)
        _write_best(export_path, eval_result)
        _keep_newest(export_path, self._exports_to_keep)
        _log.info("Best model so far exported to %s: %s", path, eval_result)
        return path


def export_saved_model(
    model: keras.Model,
    export_dir_base: str,
    serving_model_fn: ServingModelFn | None = None,
    assets_extra: Mapping[str, str] | None = None,
) -> str:
    """Writes a SavedModel under the time, in seconds, as its number.

    The number is greater than any that is there. What fails leaves nothing
    behind; leftovers of a process that died are removed after an hour.

    Args:
        model: A built Keras model.
        export_dir_base: Where the numbered directories are.
        serving_model_fn: See `Exporter`.
        assets_extra: See `Exporter`.

    Returns:
        The path of the new directory.

    Raises:
        FileNotFoundError: a source of `assets_extra` does not exist.
        RuntimeError: other processes took ten numbers in a row.
        TypeError: `serving_model_fn` returned something else.
    """
    _check_serving_model_fn(serving_model_fn)
    assets_extra = _checked_assets(assets_extra)
    for source in assets_extra.values():
        if not tf.io.gfile.exists(source):
            raise FileNotFoundError(
                f"Source {source!r} of `assets_extra` does not exist."
            )
    served = _served(model, serving_model_fn)
    _remove_abandoned(export_dir_base)
    temporary = _unused_directory(export_dir_base)
    try:
        for destination, source in assets_extra.items():
            target = os.path.join(temporary, "assets.extra", destination)
            tf.io.gfile.makedirs(os.path.dirname(target))
            tf.io.gfile.copy(source, target)
        serving.write(served, temporary)
        return _publish(temporary, export_dir_base)
    finally:
        if tf.io.gfile.exists(temporary):
            tf.io.gfile.rmtree(temporary)


def list_exports(export_path: str) -> list[str]:
    """The complete exports under `export_path`, oldest first."""
    return [
        os.path.join(export_path, name)
        for name in sorted(_names(export_path))
        if re.fullmatch(r"\d{10}", name)
    ]


def _served(
    model: keras.Model, serving_model_fn: ServingModelFn | None
) -> Serving:
    served = model
    if serving_model_fn is not None:
        served = serving_model_fn(model)
    elif hasattr(model, "serving"):
        served = model.serving()
    if isinstance(served, keras.Model):
        return Serving.of(served)
    if not isinstance(served, Serving):
        raise TypeError(
            "The `serving_model_fn` must return a keras.Model or a "
            f"tfdist.Serving. Received: {served!r}."
        )
    return served


def _names(path: str) -> list[str]:
    if not tf.io.gfile.isdir(path):
        return []
    return [name.rstrip("/") for name in tf.io.gfile.listdir(path)]


def _next_number(export_path: str) -> int:
    """Seconds since the epoch, as TensorFlow Serving wants its versions.

    Always later than any other, for the latest is the one that is served.
    """
    numbers = [int(os.path.basename(p)) for p in list_exports(export_path)]
    return max([int(time.time()), *(number + 1 for number in numbers)])


def _unused_directory(export_path: str) -> str:
    """A new directory of a name that no server reads."""
    number = _next_number(export_path)
    while True:
        path = os.path.join(export_path, f"temp-{number:010d}")
        if not tf.io.gfile.exists(path):
            tf.io.gfile.makedirs(path)
            return path
        number += 1


def _publish(temporary: str, export_path: str) -> str:
    """Gives a complete export the next number."""
    for _ in range(_ATTEMPTS):
        number = _next_number(export_path)
        final = os.path.join(export_path, f"{number:010d}")
        try:
            _move(temporary, final)
        except tf.errors.OpError:
            # Another process may have taken the number: then take the next.
            if not tf.io.gfile.exists(final):
                raise
            continue
        return final
    raise RuntimeError(
        f"No number was free under {export_path!r} in {_ATTEMPTS} attempts: "
        "other processes export there. Give each exporter its own name."
    )


def _move(temporary: str, final: str) -> None:
    """Renames; where files move one by one, the one that is looked for last."""
    if "://" not in final:
        tf.io.gfile.rename(temporary, final)
        return
    found = [
        os.path.join(directory, name)
        for directory, _, names in tf.io.gfile.walk(temporary)
        for name in names
    ]
    for path in sorted(found, key=lambda p: p.endswith("/saved_model.pb")):
        target = final + path.removeprefix(temporary)
        tf.io.gfile.makedirs(os.path.dirname(target))
        tf.io.gfile.rename(path, target)
    tf.io.gfile.rmtree(temporary)


def _remove_abandoned(export_path: str) -> None:
    """Removes what processes left that died while they exported."""
    for name in _names(export_path):
        match = re.fullmatch(r"temp-(\d{10})", name)
        if match and int(match[1]) < time.time() - _ABANDONED_SECS:
            tf.io.gfile.rmtree(os.path.join(export_path, name))


def _keep_newest(export_path: str, exports_to_keep: int | None) -> None:
    if exports_to_keep is not None:
        for old in list_exports(export_path)[:-exports_to_keep]:
            tf.io.gfile.rmtree(old)


def _read_best(export_path: str) -> dict[str, float] | None:
    """The best result so far, if its export is still there."""
    path = os.path.join(export_path, _BEST_FILE)
    if not list_exports(export_path) or not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path) as file:
        return json.loads(file.read())["best_eval_result"]


def _write_best(export_path: str, eval_result: dict[str, float]) -> None:
    path = os.path.join(export_path, _BEST_FILE)
    numbers = {name: float(value) for name, value in eval_result.items()}
    with tf.io.gfile.GFile(f"{path}.temp", "w") as file:
        file.write(json.dumps({"best_eval_result": numbers}))
    tf.io.gfile.rename(f"{path}.temp", path, overwrite=True)


def _check_serving_model_fn(serving_model_fn: ServingModelFn | None) -> None:
    if serving_model_fn is not None and not callable(serving_model_fn):
        raise TypeError(
            "Argument `serving_model_fn` must be callable. Received: "
            f"serving_model_fn={serving_model_fn!r}."
        )


def _check_exports_to_keep(exports_to_keep: int | None) -> None:
    if exports_to_keep is not None and exports_to_keep <= 0:
        raise ValueError(
            "Argument `exports_to_keep` must be positive or None. "
            f"Received: exports_to_keep={exports_to_keep}."
        )


def _check_compare_fn(compare_fn: CompareFn) -> None:
    """As `tf.estimator`: it is called with keywords, so names matter."""
    if compare_fn is None:
        raise ValueError("Argument `compare_fn` must not be None.")
    if not callable(compare_fn):
        raise TypeError(
            "Argument `compare_fn` must be callable. Received: "
            f"compare_fn={compare_fn!r}."
        )
    names = set(inspect.signature(compare_fn).parameters)
    wanted = {"best_eval_result", "current_eval_result"}
    if names != wanted:
        raise ValueError(
            "Argument `compare_fn` must have the arguments `best_eval_result` "
            f"and `current_eval_result`. Missing: {sorted(wanted - names)}; "
            f"not expected: {sorted(names - wanted)}."
        )


def _checked_assets(assets_extra: Mapping[str, str] | None) -> dict[str, str]:
    if assets_extra is None:
        return {}
    if not isinstance(assets_extra, Mapping) or not all(
        isinstance(path, str | os.PathLike)
        for pair in assets_extra.items()
        for path in pair
    ):
        raise TypeError(
            "Argument `assets_extra` must be a dictionary from destination "
            f"to source paths. Received: assets_extra={assets_extra!r}."
        )
    checked = {}
    for destination, source in assets_extra.items():
        normal = os.path.normpath(os.fspath(destination))
        if os.path.isabs(normal) or normal.split(os.sep)[0] in ("..", "."):
            raise ValueError(
                "Destinations of `assets_extra` must be paths of files inside "
                f"of `assets.extra`. Received: {destination!r}."
            )
        checked[normal] = os.fspath(source)
    return checked
