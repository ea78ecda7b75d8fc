"""The private Keras names that tfdist cannot do without; see `private`."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow.layer import TFLayer
from keras.src.trainers import data_adapters
from keras.src.utils import naming

SEED_STATE_NAME = "seed_generator_state"
"""Name of the variable in which a `keras.random.SeedGenerator` counts, which
Keras marks in no other way. A step gives each generator a seed of its own."""

METHODS_OF_ALL_GRADIENTS = (
    "apply",
    "apply_gradients",
    "_clip_gradients",
    "_apply_weight_decay",
    "_backend_update_step",
    "_update_model_variables_moving_average",
)
"""What an optimizer does for all variables together, around `update_step`."""

_GLOBAL_SEED_GENERATOR = "global_seed_generator"
_OBJECT_NAMES = "object_name_uids"


def seed_generator() -> keras.random.SeedGenerator | None:
    """This thread's generator for `keras.random` without a seed, if any yet."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def use_seed_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Has this thread draw from the generator of another."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def reset_object_names() -> None:
    """Restarts Keras' numbering of unnamed layers (`dense`, `dense_1`, ...).

    A model function that is called twice must make the same paths, the names in
    checkpoints. (`keras.utils.clear_session()` drops the user's dtype policy.)
    """
    naming.reset_uids()


@contextlib.contextmanager
def own_object_names() -> Iterator[None]:
    """Numbers unnamed layers from the start; those outside go on after it."""
    _forget_uninitialized()
    before = global_state.get_global_attribute(_OBJECT_NAMES)
    reset_object_names()
    try:
        yield
    except ValueError as error:
        if "names should be unique" in str(error):
            error.add_note(
                "The layers that a model function makes are numbered from the "
                "start at each call, so one that was made outside may have "
                "the same name: give that a `name` of its own, or make it "
                "inside."
            )
        raise
    finally:
        global_state.set_global_attribute(_OBJECT_NAMES, before)


def _forget_uninitialized() -> None:
    """Drops variables that an earlier model could not make.

    Keras makes them at the end of a `StatelessScope`. After an error or an
    interrupt there, they stay on its list, and every later scope of the process
    fails: one "is already initialized".
    """
    if global_state.get_global_attribute("stateless_scope") is None:
        global_state.set_global_attribute("uninitialized_variables", [])


@contextlib.contextmanager
def assigned() -> Iterator[list[Any]]:
    """Notes the variables that are assigned to, by whatever of Keras."""
    found: list[Any] = []
    own = keras.Variable.assign

    def assign(self: keras.Variable, value: Any) -> Any:
        found.append(self)
        return own(self, value)

    keras.Variable.assign = assign
    try:
        yield found
    finally:
        keras.Variable.assign = own


@contextlib.contextmanager
def without_default_signatures() -> Iterator[None]:
    """Has a SavedModel hold none of those that Keras adds for inner models.

    It guesses their dtypes: a float for a string, say, which fails.
    """
    added = TFLayer._default_save_signature
    TFLayer._default_save_signature = None
    try:
        yield
    finally:
        TFLayer._default_save_signature = added


def slot_lists(optimizer: keras.optimizers.Optimizer) -> dict[str, list]:
    """An optimizer's lists of a slot for each trainable variable, by name."""
    own = {id(variable) for variable in optimizer.variables}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if isinstance(value, list)
        and len(value) == len(optimizer._trainable_variables)
        and value is not optimizer._trainable_variables
        and value is not optimizer._variables
        and any(id(item) in own for item in value)
    }


def variable_index(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> int:
    """Where in each of `slot_lists` the slot of `variable` is."""
    return optimizer._get_variable_index(variable)


def leave_strategy(model: keras.Model) -> None:
    """Has a model, and those in it, predict and evaluate in this process alone.

    A callback may ask for it. Keras uses the strategy in whose scope they were
    made, which fails on parameter servers and in all-reduce.
    """
    for each in model._flatten_layers():
        if isinstance(each, keras.Model):
            each._distribute_strategy = None


def tell_apart(model: keras.Model) -> None:
    """Gives variables that share a path, and their layers, other paths.

    Keras builds the layers of a functional model before it is part of another,
    so two towers whose layers have the same names have the same paths. Now they
    begin with the names of the layers that they are in, as in a `Sequential`.
    """
    paths = collections.Counter(variable.path for variable in model.variables)
    seen: set[int] = set()

    def visit(layer: keras.layers.Layer, path: str) -> None:
        if id(layer) in seen:
            return
        seen.add(id(layer))
        inner = layer._flatten_layers(False, recursive=False)
        others = {id(v) for each in inner for v in each.variables}
        own = [v for v in layer.variables if id(v) not in others]
        if any(paths[variable.path] > 1 for variable in own):
            for variable in own:
                name = variable.path.removeprefix(f"{layer.path}/")
                variable._path = f"{path}/{name}"
            layer._path = path
        for each in inner:
            visit(each, f"{path}/{each.name}")

    if paths and max(paths.values()) > 1:
        for layer in model._flatten_layers(False, recursive=False):
            visit(layer, layer.name)


def read_statistics(model: keras.Model) -> None:
    """Has each `Normalization` use the mean and variance among its weights.

    It uses constants, which `adapt` and Keras' loading of weights make of
    these; a restored checkpoint would change nothing.
    """
    for layer in model._flatten_layers():
        is_adapted = isinstance(layer, keras.layers.Normalization)
        if is_adapted and layer.input_mean is None and layer.built:
            _read_at_call(layer)


def _read_at_call(layer: keras.layers.Normalization) -> None:
    if "call" in vars(layer):  # It was made outside of the model function.
        return
    call = layer.call

    def read_and_call(inputs: Any) -> Any:
        constants = layer.mean, layer.variance
        layer.finalize_state()
        try:
            return call(inputs)
        finally:  # Nothing of a graph may stay.
            layer.mean, layer.variance = constants

    layer.call = read_and_call


def is_built(model: keras.Model, itself: bool = True) -> bool:
    """Whether every layer in a model is built, also in others, and `itself`."""
    return all(layer.built for layer in model._flatten_layers(itself))


def is_synchronized(model: keras.Model) -> bool:
    """Whether a layer, also in another one, looks at all replicas' batches."""
    layers = model._flatten_layers()
    return any(getattr(layer, "synchronized", False) for layer in layers)


class _OwnIds(threading.local):
    """A set, another one for each thread."""

    def __init__(self) -> None:
        ids: set[int] = set()
        self.add, self.clear = ids.add, ids.clear
        self.__contains = ids.__contains__

    def __contains__(self, value: int) -> bool:
        return self.__contains(value)


def keep_losses_apart(model: keras.Model) -> None:
    """Has each thread keep what its own call of the model has added as losses.

    A call begins with forgetting what was added before, and replicas take turns
    in the midst of a call, where they wait for each other.
    """
    for layer in model._flatten_layers():
        vars(layer)["_loss_ids"] = _OwnIds()


def attribute(model: keras.Model, handle: tf.Tensor) -> str:
    """Which attribute of a layer the variable with this handle is; or ""."""
    for layer in model._flatten_layers():
        for name, value in vars(layer).items():
            own = getattr(value, "values", [value])
            own = own if isinstance(own, list | tuple) else [value]
            if any(getattr(v, "handle", None) is handle for v in own):
                return f"`{name}` of layer {layer.name!r}"
    return ""


def optimizers_in(values: Any) -> Iterator[keras.optimizers.Optimizer]:
    """The optimizers in a structure."""
    for each in values.values() if isinstance(values, dict) else values:
        if isinstance(each, keras.optimizers.Optimizer):
            yield each
        elif isinstance(each, dict | list | tuple):
            yield from optimizers_in(each)


def held_optimizers(model: keras.Model) -> set[keras.optimizers.Optimizer]:
    """Those that the model and its layers have as attributes."""
    layers = model._flatten_layers()
    return {each for layer in layers for each in optimizers_in(vars(layer))}


def forget_rates(optimizer: keras.optimizers.Optimizer) -> None:
    """Has copies of an optimizer, which never update, have Keras' default rate.

    Keras can copy no schedule that has no `get_config`, or is a user's own.
    """
    vars(optimizer)["_learning_rate"] = None
    for part in optimizers_in(vars(optimizer)):
        forget_rates(part)


def uses_weight_decay(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Whether `exclude_from_weight_decay` spares `variable`."""
    return optimizer._use_weight_decay(variable)


def nadam_product(optimizer: keras.optimizers.Nadam) -> keras.Variable:
    """The product of Nadam's momentum schedule so far."""
    return optimizer._u_product


def counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """What counts an optimizer's steps; `iterations` is computed from it."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


class VariableBeside(keras.Variable):
    """Zeros that no gradient reaches, made where another variable is.

    Keras makes variables later, where a model is built without being run.
    """

    def __init__(
        self,
        other: keras.Variable,
        shape: tuple[int, ...],
        dtype: str,
        name: str,
    ) -> None:
        self._other = other
        zeros = keras.initializers.Zeros()
        super().__init__(zeros, shape, dtype, trainable=False, name=name)

    def _initialize(self, value: Any) -> None:
        made = tf.distribute.get_strategy().extended
        with made.colocate_vars_with(self._other.value):
            super()._initialize(value)


def replaces_fit() -> str:
    """The package that has put another `fit` into Keras' models; or ""."""
    scope = getattr(keras.Model.fit, "__globals__", {})
    package = scope.get("__name__", "keras").partition(".")[0]
    return "" if package == "keras" else package


def profiles(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether it was given a `profile_batch`."""
    return callback._should_trace


def go_on_at(
    callback: keras.callbacks.ModelCheckpoint, step: int, steps_per_epoch: int
) -> None:
    """Has one that saves by batches count as if it had seen so many steps."""
    epoch, batches = divmod(step, steps_per_epoch)
    callback._current_epoch = epoch
    callback._batches_seen_since_last_saving = step % callback.save_freq
    callback._last_batch_seen = batches - 1 if batches else None


def part_index(optimizer: Any, variable: keras.Variable) -> int:
    """Which optimizer of a built `MultiOptimizer` updates `variable`."""
    return optimizer._var_to_optimizer_idx[optimizer._var_key(variable)]


def trained(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    return optimizer._trainable_variables


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The metric that `compile` makes for the loss; others may be called so."""
    return model._loss_tracker


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """The mask that a Keras layer has given to its output, for a loss."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Gives a tensor a mask, where Keras looks for it."""
    tensor._keras_mask = mask


def py_dataset_batches(
    data: keras.utils.PyDataset, shuffle: bool
) -> Iterator[Any]:
    """A pass over a `PyDataset`, whose own workers load it, as for `fit`."""
    adapter = data_adapters.get_data_adapter(data, shuffle=shuffle)
    adapter.on_epoch_begin()
    with contextlib.ExitStack() as at_end:
        at_end.callback(adapter.on_epoch_end)
        for number, batch in enumerate(adapter.get_numpy_iterator(), 1):
            if number == adapter.num_batches:  # Nobody may ask for more.
                at_end.close()
            yield batch


def py_dataset_spec(data: keras.utils.PyDataset) -> Any:
    """The element spec of its batches."""
    return data_adapters.get_data_adapter(data).get_tf_dataset().element_spec
