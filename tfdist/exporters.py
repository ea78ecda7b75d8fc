"""SavedModels from an evaluated model: `<model_dir>/export/<name>/<time>/`.

Written by Keras' `ExportArchive`, whose result TensorFlow Serving's C++ loader
reads; `tf.saved_model.save(keras_model)` loads in Python and fails there.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable

import keras
import tensorflow as tf

ServingModelFn = Callable[[keras.Model], keras.Model]


class Exporter:
    """Base of exporters: a name and what to export.

    Differs from `tf.estimator.Exporter`: it gets the evaluated Keras model
    instead of an estimator and a checkpoint path, and `serving_model_fn`
    replaces `serving_input_receiver_fn`.

    Args:
        name: Directory under `<model_dir>/export`.
        serving_model_fn: From the trained model to the Keras model to export,
            for example with preprocessing in front and named outputs. Its
            input names are the signature's inputs, and if its output is a
            dict, the keys are the signature's outputs. Default: the model.

    Raises:
        ValueError: `name` is empty or no plain directory name.
        TypeError: `serving_model_fn` is not callable.
    """

    def __init__(
        self, name: str, serving_model_fn: ServingModelFn | None = None
    ) -> None:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError(
                "Argument `name` must be a directory name: letters, digits, "
                f"'_', '-', '.'. Received: name={name!r}."
            )
        if serving_model_fn is not None and not callable(serving_model_fn):
            raise TypeError(
                "Argument `serving_model_fn` must be callable. Received: "
                f"serving_model_fn={serving_model_fn!r}."
            )
        self.name = name
        self._serving_model_fn = serving_model_fn

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
        """Writes beside the final name, then renames: nothing half-written."""
        if self._serving_model_fn:
            model = self._serving_model_fn(model)
        tf.io.gfile.makedirs(export_path)
        final = _unused_timestamp(export_path)
        temporary = os.path.join(export_path, f"temp-{os.path.basename(final)}")
        model.export(temporary, format="tf_saved_model", verbose=False)
        tf.io.gfile.rename(temporary, final)
        return final


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

    Raises:
        ValueError: `exports_to_keep` is not positive.
    """

    def __init__(
        self,
        name: str,
        serving_model_fn: ServingModelFn | None = None,
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_model_fn)
        if exports_to_keep is not None and exports_to_keep <= 0:
            raise ValueError(
                "Argument `exports_to_keep` must be positive or None. "
                f"Received: exports_to_keep={exports_to_keep}."
            )
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
        if self._exports_to_keep is not None:
            for old in list_exports(export_path)[: -self._exports_to_keep]:
                tf.io.gfile.rmtree(old)
        return path


def list_exports(export_path: str) -> list[str]:
    """The complete exports under `export_path`, oldest first."""
    names = [n.rstrip("/") for n in tf.io.gfile.listdir(export_path)]
    return [
        os.path.join(export_path, name)
        for name in sorted(names)
        if re.fullmatch(r"\d{10}", name)
    ]


def _unused_timestamp(export_path: str) -> str:
    """Seconds since the epoch, as TensorFlow Serving wants its versions.

    Always later than any other, for the latest is the one that is served.
    """
    timestamp = int(time.time())
    for latest in list_exports(export_path)[-1:]:
        timestamp = max(timestamp, int(os.path.basename(latest)) + 1)
    return os.path.join(export_path, f"{timestamp:010d}")
