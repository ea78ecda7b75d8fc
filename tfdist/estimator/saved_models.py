"""Exports models to directories named by time: `<base>/<seconds>/`.

`tfdist.estimator.serving` describes their signatures. A directory gets its
final name when it is complete, and TensorFlow Serving loads the one with the
largest number; a failed export leaves nothing behind. (On an object store,
where directories cannot be renamed atomically, `saved_model.pb` is moved last,
and processes that may export in the same second need separate directories.)
"""

from __future__ import annotations

import logging
import os
import re
import time
import uuid
from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.arguments import check_callable, check_one_of
from tfdist.estimator import serving
from tfdist.estimator.serving import Serving
from tfdist.training.compiled_model import overrides

_log = logging.getLogger(__name__)

ServingModelFn = Callable[[keras.Model], keras.Model | Serving]

# Seconds after which a temporary directory belongs to a process that died.
_ABANDONED_SECS = 3600
_NUMBER = r"\d{10}"
_LAST_FILE = "saved_model.pb"
_KERAS_FILES = {"keras": "model.keras", "weights": "model.weights.h5"}
FORMATS = ("saved_model", *_KERAS_FILES)


def export_saved_model(
    model: keras.Model,
    export_dir_base: str,
    serving_model_fn: ServingModelFn | None = None,
    assets_extra: Mapping[str, str] | None = None,
    format: str = "saved_model",
) -> str:
    """Exports a built model to a directory named by the time in seconds.

    Returns the new directory in `export_dir_base`, whose number is greater than
    any other there. Other arguments are those of `Exporter`. Partial exports
    of dead processes are removed after an hour, or when their job restarts.

    >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> path = export_saved_model(model, directory)
    >>> list_exports(directory) == [path]
    True

    Raises:
        FileNotFoundError: a source of `assets_extra` does not exist.
        TypeError: `serving_model_fn` returned an unsupported object.
        ValueError: `export_dir_base` begins with `~` or contains a glob
            pattern; `format="keras"` for a model without `get_config`.
    """
    if serving_model_fn is not None:
        check_callable(
            "serving_model_fn", serving_model_fn, "the trained model"
        )
    check_one_of("format", format, FORMATS)
    storage.check_no_pattern(export_dir_base)
    assets_extra = checked_assets(assets_extra)
    for source in assets_extra.values():
        if not tf.io.gfile.exists(source):
            raise FileNotFoundError(
                f"Source {source!r} of `assets_extra` does not exist."
            )
    served = _served(model, serving_model_fn, format)
    remove_abandoned(export_dir_base, _ABANDONED_SECS)
    name = f"temp-{int(time.time()):010d}-{uuid.uuid4().hex}"
    temporary = os.path.join(export_dir_base, name)
    storage.make_directory(temporary)
    try:
        for destination, source in assets_extra.items():
            target = os.path.join(temporary, "assets.extra", destination)
            tf.io.gfile.makedirs(os.path.dirname(target))
            tf.io.gfile.copy(source, target)
        if isinstance(served, Serving):
            serving.write(served, temporary)
        elif format == "saved_model":
            served.export(temporary, format="tf_saved_model", verbose=False)
        else:
            save = served.save if format == "keras" else served.save_weights
            save(os.path.join(temporary, _KERAS_FILES[format]))
        return _publish(temporary, export_dir_base)
    finally:
        storage.remove_tree(temporary)


def list_exports(export_path: str) -> list[str]:
    """Returns the complete exports under `export_path`, oldest first.

    >>> tfdist.estimator.list_exports(directory)
    []
    """
    names = sorted(storage.names_in(export_path))
    numbers = (name for name in names if re.fullmatch(_NUMBER, name))
    paths = [os.path.join(export_path, number) for number in numbers]
    return [path for path in paths if _is_complete(path)]


def _is_complete(path: str) -> bool:
    """Whether a numbered directory has all its files."""
    return not storage.is_object_store(path) or any(
        tf.io.gfile.exists(os.path.join(path, name))
        for name in (_LAST_FILE, *_KERAS_FILES.values())
    )


def _served(
    model: keras.Model, serving_model_fn: ServingModelFn | None, format: str
) -> Serving | keras.Model:
    """Returns what to write: a `Serving`, or else a model as it is."""
    in_keras, served = format in _KERAS_FILES, model
    if serving_model_fn is not None:
        served = serving_model_fn(model)
    elif callable(getattr(model, "serving", None)) and not in_keras:
        served = model.serving()
    wanted = keras.Model if in_keras else keras.Model | Serving
    if not isinstance(served, wanted):
        or_serving = "" if in_keras else " or a tfdist.Serving"
        raise TypeError(
            f"With format={format!r} the `serving_model_fn` must return a "
            f"keras.Model{or_serving}. Received: {served!r}."
        )
    if format == "keras":
        check_has_config(served)
    if in_keras or isinstance(served, Serving):
        return served
    if overrides(served, "predict_step"):
        _log.warning(
            "The export of model %r returns the outputs of its `call`, unlike "
            "`predict`, which returns those of its `predict_step`. To export "
            "these, pass a `serving_model_fn` that returns "
            "tfdist.Serving.of(model, predict=...).",
            served.name,
        )
    if serving.inputs_of(served) is not None:
        return Serving.of(served)
    serving.warn_of_no_examples(served, "its inputs are unknown")
    return served


def check_has_config(model: keras.Model) -> None:
    """Raises `ValueError` unless Keras can serialize the model's config."""
    try:
        model.get_config()
    except NotImplementedError as error:
        what = " ".join(str(error).partition("Example:")[0].split())
        raise ValueError(
            f"Model {model.name!r} cannot be exported with format='keras': "
            f"{what} Or use format='weights', or a `serving_model_fn` that "
            "returns a model with `get_config`."
        ) from error


def _publish(temporary: str, export_path: str) -> str:
    """Renames a complete export to the current time, or the next free number.

    Its number is the greatest, because the latest export is served.
    """
    names = storage.names_in(export_path)
    numbers = [int(name) for name in names if re.fullmatch(_NUMBER, name)]
    number = max([int(time.time()), *(n + 1 for n in numbers)])
    final = os.path.join(export_path, f"{number:010d}")
    on_store = storage.is_object_store(final)
    try:
        if not on_store:
            tf.io.gfile.rename(temporary, final)
        else:
            for pair in storage.files_to_move(temporary, final, _LAST_FILE):
                tf.io.gfile.rename(*pair)
    except tf.errors.OpError:
        if on_store:
            storage.remove_tree(final)
        if on_store or not tf.io.gfile.exists(final):
            raise
        # Another process has just taken this number.
        return _publish(temporary, export_path)
    return final


def remove_abandoned(export_path: str, after_secs: float = 0.0) -> None:
    """Removes partial exports that dead processes left behind.

    Exports begun `after_secs` ago count; with 0, no process may be exporting.
    """
    for name in storage.names_in(export_path):
        match = re.fullmatch(rf"({_NUMBER})|temp-({_NUMBER})(-\w+)?", name)
        if match and int(match[1] or match[2]) < time.time() - after_secs:
            path = os.path.join(export_path, name)
            if match[2] or not _is_complete(path):
                storage.remove_tree(path)


def checked_assets(assets_extra: Mapping[str, str] | None) -> dict[str, str]:
    """Returns a dictionary from normalized destinations to sources."""
    if assets_extra is None:
        return {}
    if not isinstance(assets_extra, Mapping) or not all(
        isinstance(path, str | os.PathLike)
        for pair in assets_extra.items()
        for path in pair
    ):
        raise TypeError(
            "Argument `assets_extra` must be a dictionary from destination "
            f"paths to source paths. Received: assets_extra={assets_extra!r}."
        )
    checked = {}
    for destination, source in assets_extra.items():
        normal = os.path.normpath(os.fspath(destination))
        if os.path.isabs(normal) or normal.split(os.sep)[0] in ("..", "."):
            raise ValueError(
                "Destinations of `assets_extra` must be relative paths of "
                f"files inside of `assets.extra`. Received: {destination!r}."
            )
        checked[normal] = os.fspath(source)
    return checked
