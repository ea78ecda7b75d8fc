"""The model of a finished job, where Vertex AI looks for it."""

from __future__ import annotations

import os

import tensorflow as tf

from tfdist._tf import storage

_LAST = "saved_model.pb"
_FOLDERS = ("variables", "assets", "assets.extra")


def check_export_dir(directory: str) -> None:
    """Fails at a job's start, not at its end, if it could copy no model there.

    >>> tfdist.vertex.check_export_dir(f"{directory}/model/")

    Raises:
        ValueError: no file can be written in `directory`, which is made.
    """
    storage.check_writable(directory.rstrip("/"), "export_dir")


def copy_export(export: str, directory: str) -> None:
    """Copies a SavedModel to a directory itself, in place of what is there.

    Exporters write to a directory named by time below `model_dir`; an upload to
    Vertex AI's Model Registry takes the SavedModel in `AIP_MODEL_DIR` itself.
    `saved_model.pb` goes first and comes last: whoever finds it finds a whole
    model. Only one task of a job may call it, the chief when training is over.

    >>> model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    >>> export = tfdist.estimator.export_saved_model(model, directory)
    >>> tfdist.vertex.copy_export(export, f"{directory}/model/")
    >>> sorted(tf.io.gfile.listdir(f"{directory}/model"))
    ['assets', 'fingerprint.pb', 'saved_model.pb', 'variables']

    Args:
        export: A SavedModel, as `train_and_evaluate` returns its path.
        directory: Where it shall be, such as `os.environ["AIP_MODEL_DIR"]`.
            Other files there stay.

    Raises:
        ValueError: `export` is no SavedModel.
    """
    if not tf.io.gfile.exists(os.path.join(export, _LAST)):
        raise ValueError(
            f"Argument `export` must be a SavedModel. Received: {export!r}, "
            f"which has no {_LAST}."
        )
    if storage.same_path(export, directory):
        return  # Else it would be removed before it is copied.
    export, target = export.rstrip("/"), directory.rstrip("/")
    storage.make_directory(target)
    if tf.io.gfile.exists(os.path.join(target, _LAST)):
        tf.io.gfile.remove(os.path.join(target, _LAST))
    for name in _FOLDERS:
        storage.remove_tree(os.path.join(target, name))
    for path, copy in storage.files_to_move(export, target, _LAST):
        tf.io.gfile.copy(path, copy, overwrite=True)
