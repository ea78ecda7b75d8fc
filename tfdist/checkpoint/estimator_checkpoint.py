"""Reads checkpoints of TF's Estimator into Keras models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import keras
import tensorflow as tf

from tfdist._tf.private_checkpoints import Saveable
from tfdist._tf.private_keras import SEED_STATE_NAME
from tfdist.checkpoint.names import named_variables

# From names here to those of TF 2.15; all other names are the same.
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
# Slots that have the same meaning in TF 2.15: their names in Keras 2, and the
# suffix of the variable's name with an optimizer of `tf.train`.
_SLOTS = {
    ("Adagrad", "accumulator"): ("accumulator", "Adagrad"),
    ("Adam", "momentum"): ("m", "Adam"),
    ("Adam", "velocity"): ("v", "Adam_1"),
    ("Ftrl", "accumulator"): ("accumulator", "Ftrl"),
    ("Ftrl", "linear"): ("linear", "Ftrl_1"),
    ("RMSprop", "velocity"): ("rms", "RMSProp"),
    ("RMSprop", "momentum"): ("momentum", ""),
    ("RMSprop", "average_gradient"): ("mg", ""),
    ("SGD", "momentum"): ("momentum", ""),
}


def estimator_name(path: str) -> str:
    """Returns the name of a canned model's variable in TF 2.15.

    >>> estimator_name("linear/job/embeddings")
    'linear/linear_model/job/weights'
    >>> estimator_name("dnn/logits/bias")
    'dnn/logits/bias'
    """
    for pattern, replacement in _RULES:
        path = re.sub(pattern, replacement, path)
    return path


def saved_weight_name(name: str, saved: Iterable[str]) -> str:
    """Returns a weight's name in the checkpoint, also for unusual columns."""

    def plain(name: str) -> str:
        return re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)

    name = estimator_name(name)
    names = [name]
    if name.endswith("/embedding_weights"):
        # A table of `tf.feature_column.shared_embeddings` had no scope.
        names.append(name.split("/")[-2])
    for known in map(plain, names):
        found = [each for each in saved if plain(each) == known]
        if len(found) == 1:
            return found[0]
    return name


def saved_slot_name(
    weight: str, rule: str, kind: str, saved: Iterable[str]
) -> str:
    """Returns the name of a weight's slot in the checkpoint.

    >>> saved_slot_name("w", "Adam", "momentum", ["w", "training/Adam_1/w/m"])
    'training/Adam_1/w/m'
    >>> saved_slot_name("w", "Ftrl", "linear", ["w", "w/Ftrl", "w/Ftrl_1"])
    'w/Ftrl_1'
    """
    keras_2, tf_train = _SLOTS.get((rule, kind), ("", ""))
    pattern = rf"(.*/)?{rule}(_\d+)?/{re.escape(weight)}/{keras_2}"
    of_weight = f"{weight}/{tf_train}"
    for name in saved if keras_2 else ():
        if name == of_weight or re.fullmatch(pattern, name):
            return name
    return f"{weight}/{rule}/{kind}"


def restore(path: str, variables: Mapping[str, Saveable]) -> None:
    """Assigns the values in a TF1 checkpoint to `variables`, by its names.

    Raises an error, and assigns nothing, if a variable is missing or has
    another shape.
    """
    reader = tf.train.load_checkpoint(path)
    shapes = reader.get_variable_to_shape_map()
    wrong = [
        f"{name}: {[*variable.shape]}, saved {shapes.get(name)}"
        for name, variable in variables.items()
        if shapes.get(name) != [*variable.shape]
    ]
    if wrong:
        raise ValueError(
            f"Checkpoint {path!r} does not fit the model. Expected: "
            f"{'; '.join(wrong)}. The checkpoint has: {sorted(shapes)}."
        )
    for name, variable in variables.items():
        value = reader.get_tensor(name)
        variable.assign(value.astype(variable.dtype.as_numpy_dtype))


def read_estimator_checkpoint(model: keras.Model, path: str) -> list[str]:
    """Loads the weights of TF's canned estimator into a canned model.

    The columns, the hidden layers and the classes must be the same. Optimizer
    slots and the step are not changed; `tfdist.WarmStartSettings` loads slots,
    too.

    Args:
        model: The model returned by the `model_fn` of a canned estimator.
        path: A checkpoint, or a directory whose latest checkpoint is read.

    Returns:
        The names of the variables that were read.

    Raises:
        ValueError: the checkpoint lacks a variable, or has it in another shape
            (nothing is changed then); or there is no checkpoint.
    """
    saved = tf.train.load_checkpoint(path).get_variable_to_shape_map()
    variables = {
        saved_weight_name(name, saved): variable
        for name, variable in named_variables(model, optimizer=False).items()
        if not name.endswith(SEED_STATE_NAME)
    }
    restore(path, variables)
    return sorted(variables)
