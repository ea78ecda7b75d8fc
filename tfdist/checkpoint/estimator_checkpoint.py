"""Weights of a TF Estimator's checkpoint, read into a canned model."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

import keras
import tensorflow as tf

from tfdist._tf.private_keras import SEED_STATE_NAME
from tfdist.embeddings.layer import logical_path, own_rows

# From names here to those of TF 2.15; what fits none is called the same.
_RULES = (
    (r"^linear/bias_weights$", r"linear/linear_model/bias_weights"),
    (
        r"^linear/([^/]+)/(?:embeddings|kernel)$",
        r"linear/linear_model/\1/weights",
    ),
    (
        r"^dnn/input_layer/([^/]+)/embeddings$",
        r"dnn/input_from_feature_columns/input_layer/\1/embedding_weights",
    ),
    (r"^dnn/batchnorm_(\d+)/", r"dnn/hiddenlayer_\1/batchnorm_\1/"),
)


def estimator_name(path: str) -> str:
    """What TF 2.15 called the variable of a canned model.

    >>> estimator_name("linear/job/embeddings")
    'linear/linear_model/job/weights'
    >>> estimator_name("dnn/logits/bias")
    'dnn/logits/bias'
    """
    for pattern, replacement in _RULES:
        path = re.sub(pattern, replacement, path)
    return path


def _saved_name(name: str, saved: Iterable[str]) -> str:
    """What a checkpoint calls it, whatever its column's name is made of."""

    def plain(name: str) -> str:
        return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)

    names = [name]
    if name.endswith("/embedding_weights"):
        # A table of `tf.feature_column.shared_embeddings` had no scope.
        names.append(name.split("/")[-2])
    for known in map(plain, names):
        found = [each for each in saved if plain(each) == known]
        if len(found) == 1:
            return found[0]
    return name


def read_estimator_checkpoint(model: keras.Model, path: str) -> list[str]:
    """Gives a canned model the weights that TF's canned estimator learned.

    The columns, the hidden layers and the classes must be the same. Slots of
    optimizers and the step are left alone: training starts at step 0, from
    these weights.

    Args:
        model: What the `model_fn` of a canned estimator returns.
        path: Checkpoint, or directory of which the latest is read.

    Returns:
        The names of the variables that were read.

    Raises:
        ValueError: the checkpoint lacks a variable, or has it in another shape
            (nothing is changed then); or there is no checkpoint.
    """
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    wanted: dict[str, list[keras.Variable]] = defaultdict(list)
    for variable in model.variables:
        if not variable.path.endswith(SEED_STATE_NAME):
            name = estimator_name(logical_path(variable))
            wanted[_saved_name(name, shapes)].append(variable)
    wrong = []
    for name, pieces in wanted.items():
        rows = sum(v.shape[0] for v in pieces)
        shape = [rows, *pieces[0].shape[1:]]
        if shapes.get(name) != shape:
            wrong.append(f"{name}: {shape}, there {shapes.get(name)}")
    if wrong:
        raise ValueError(
            f"Checkpoint {path!r} does not fit the model. Wanted: "
            f"{'; '.join(wrong)}. The checkpoint has: {sorted(shapes)}."
        )
    for name, pieces in wanted.items():
        value = reader.get_tensor(name)
        for piece in pieces:
            piece.assign(own_rows(piece, value))
    return sorted(wanted)
