"""Copies the model of a finished job to where Vertex AI expects it."""

from __future__ import annotations

import os

import tensorflow as tf

from tfdist._tf import storage

_LAST = "saved_model.pb"
_FOLDERS = ("variables", "assets", "assets.extra")


def check_export_dir(directory: str) -> None:
    """Checks that a model can be copied to a directory; call it at job start.

    >>> tfdist.vertex.check_export_dir(f"{directory}/model/")

    Raises:
        ValueError: `directory`, which is created, is not writable.
    """
    storage.check_writable(directory.rstrip("/"), "export_dir")


def copy_export(export: str, directory: str) -> None:
    """Copies a SavedModel into a directory, replacing the model in it.

    Exporters write to a timestamped directory below `model_dir`, but an upload
    to Vertex AI's Model Registry expects the SavedModel in `AIP_MODEL_DIR`
    itself. `saved_model.pb` is removed first and copied last: where it exists,
    the model is complete. Only the chief may call this, after training.

    >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> export = tfdist.estimator.export_saved_model(model, directory)
    >>> tfdist.vertex.copy_export(export, f"{directory}/model/")
    >>> sorted(tf.io.gfile.listdir(f"{directory}/model"))
    ['assets', 'fingerprint.pb', 'saved_model.pb', 'variables']

    Args:
        export: The path of a SavedModel, as `train_and_evaluate` returns it.
        directory: The target, such as `os.environ["AIP_MODEL_DIR"]`. Other
            files in it are kept.

    Raises:
        ValueError: `export` is not a SavedModel.
    """
    if not tf.io.gfile.exists(os.path.join(export, _LAST)):
        raise ValueError(
            f"Argument `export` must be a SavedModel. Received: {export!r}, "
            f"which has no {_LAST}."
        )
    if storage.same_path(export, directory):
        return  # The model would be removed before it is copied.
    export, target = export.rstrip("/"), directory.rstrip("/")
    storage.make_directory(target)
    if tf.io.gfile.exists(os.path.join(target, _LAST)):
        tf.io.gfile.remove(os.path.join(target, _LAST))
    for name in _FOLDERS:
        storage.remove_tree(os.path.join(target, name))
    for path, copy in storage.files_to_move(export, target, _LAST):
        tf.io.gfile.copy(path, copy, overwrite=True)
