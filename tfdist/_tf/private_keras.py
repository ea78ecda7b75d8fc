"""The private Keras names that tfdist cannot do without; see `private`."""

from __future__ import annotations

import collections
import contextlib
import math
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
"""The name of the variable in which a `keras.random.SeedGenerator` counts, its
only mark in Keras. A step gives each generator its own seed."""

METHODS_OF_ALL_GRADIENTS = (
    "apply",
    "apply_gradients",
    "_clip_gradients",
    "_apply_weight_decay",
    "_backend_update_step",
    "_update_model_variables_moving_average",
)
"""Methods that an optimizer calls for all variables, around `update_step`."""

_GLOBAL_SEED_GENERATOR = "global_seed_generator"
_OBJECT_NAMES = "object_name_uids"
_SETTINGS = "dtype_policy", "custom_objects_scope_dict", "safe_mode_saving"


def settings() -> dict[str, Any]:
    """What this thread has set for the models that it makes."""
    return {name: global_state.get_global_attribute(name) for name in _SETTINGS}


def use_settings(settings: dict[str, Any]) -> None:
    """Makes this thread use those of another one."""
    for name, value in settings.items():
        global_state.set_global_attribute(name, value)


def seed_generator() -> keras.random.SeedGenerator | None:
    """This thread's global generator for `keras.random`, if it exists yet."""
    return global_state.get_global_attribute(_GLOBAL_SEED_GENERATOR)


def use_seed_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Makes this thread draw from another thread's global generator."""
    global_state.set_global_attribute(_GLOBAL_SEED_GENERATOR, generator)


def reset_object_names() -> None:
    """Restarts Keras' numbering of unnamed layers (`dense`, `dense_1`, ...).

    A model function that is called twice must create the same paths: the names
    in checkpoints. (`keras.utils.clear_session()` resets the dtype policy.)
    """
    naming.reset_uids()


@contextlib.contextmanager
def own_object_names() -> Iterator[None]:
    """Numbers unnamed layers from the start; then restores the numbering."""
    _forget_uninitialized()
    before = global_state.get_global_attribute(_OBJECT_NAMES)
    reset_object_names()
    try:
        yield
    except ValueError as error:
        if "names should be unique" in str(error):
            error.add_note(
                "Layers that a model function creates are numbered from the "
                "start at each call, so a layer from outside may have the same "
                "name: give that layer its own `name`, or create it inside the "
                "model function."
            )
        raise
    finally:
        global_state.set_global_attribute(_OBJECT_NAMES, before)


def _forget_uninitialized() -> None:
    """Drops variables that an earlier model failed to initialize.

    Keras initializes variables at the end of a `StatelessScope`. After an error
    or an interrupt there, they stay on its list, and all later scopes of the
    process fail: a variable "is already initialized".
    """
    if global_state.get_global_attribute("stateless_scope") is None:
        global_state.set_global_attribute("uninitialized_variables", [])


@contextlib.contextmanager
def assigned() -> Iterator[list[Any]]:
    """Records the Keras variables that are assigned in this context."""
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
    """Keeps Keras from adding signatures of inner models to a SavedModel.

    Keras guesses their dtypes: for example a float for a string, which fails.
    """
    added = TFLayer._default_save_signature
    TFLayer._default_save_signature = None
    try:
        yield
    finally:
        TFLayer._default_save_signature = added


def slot_lists(optimizer: keras.optimizers.Optimizer) -> dict[str, list]:
    """An optimizer's lists, with a slot per trainable variable, by name."""
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
    """The index of the slot of `variable` in each of `slot_lists`."""
    return optimizer._get_variable_index(variable)


def leave_strategy(model: keras.Model) -> None:
    """Makes a model and inner models predict and evaluate in this process only.

    A callback may do so. Keras uses the strategy in whose scope a model was
    created, which fails on parameter servers and in all-reduce.
    """
    for each in model._flatten_layers():
        if isinstance(each, keras.Model):
            each._distribute_strategy = None


def make_paths_unique(model: keras.Model) -> None:
    """Gives variables that share a path, and their layers, distinct paths.

    Keras builds the layers of a functional model before it is part of another,
    so two towers whose layers have the same names have the same paths. The new
    paths begin with the names of the enclosing layers, as in a `Sequential`; a
    `clone_model` beside the original is called after its attribute.
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
        visit_inner(layer, f"{path}/")

    def visit_inner(layer: keras.layers.Layer, path: str) -> None:
        inner = layer._flatten_layers(False, recursive=False)
        times = collections.Counter(each.name for each in inner)
        attributes = {id(value): name for name, value in vars(layer).items()}
        for each in inner:
            alone = times[each.name] == 1
            name = each.name if alone else attributes.get(id(each), each.name)
            visit(each, path + name)

    if paths and max(paths.values()) > 1:
        visit_inner(model, "")


def read_statistics(model: keras.Model) -> None:
    """Makes each `Normalization` use the mean and variance among its weights.

    Keras uses constants, which only `adapt` and Keras' loading of weights
    compute from these; a restored checkpoint would have no effect.
    """
    for layer in model._flatten_layers():
        is_adapted = isinstance(layer, keras.layers.Normalization)
        if is_adapted and layer.input_mean is None and layer.built:
            _read_at_call(layer)


def _read_at_call(layer: keras.layers.Normalization) -> None:
    if "call" in vars(layer):  # The model function has reused a layer.
        return
    call = layer.call

    def read_and_call(inputs: Any) -> Any:
        constants = layer.mean, layer.variance
        layer.finalize_state()
        try:
            return call(inputs)
        finally:  # No tensor of a graph may stay.
            layer.mean, layer.variance = constants

    layer.call = read_and_call


def is_built(model: keras.Model, itself: bool = True) -> bool:
    """Whether all layers in a model, inner ones and `itself` too, are built."""
    return all(layer.built for layer in model._flatten_layers(itself))


def is_synchronized(model: keras.Model) -> bool:
    """Whether a layer, also an inner one, depends on all replicas' batches."""
    layers = model._flatten_layers()
    return any(getattr(layer, "synchronized", False) for layer in layers)


class _OwnLosses(threading.local):
    """A layer's losses, or their ids; separate ones in each thread."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self.add, self.extend = self._items.append, self._items.extend
        self.clear = self._items.clear

    def __contains__(self, value: int) -> bool:
        return value in self._items

    def __getitem__(self, index: slice) -> list[Any]:
        return self._items[index]


def keep_losses_per_thread(model: keras.Model) -> None:
    """Makes each thread keep the losses that its own model call has added.

    A call first clears the losses of earlier calls, and replicas take turns in
    the middle of a call, where they wait for each other.
    """
    for layer in model._flatten_layers():
        for name in ("_losses", "_loss_ids"):
            vars(layer)[name] = _OwnLosses()


def attribute(model: keras.Model, handle: tf.Tensor) -> str:
    """Names the layer attribute that has a variable's handle; "" if none."""
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
    """The optimizers that a model and its layers have as attributes."""
    layers = model._flatten_layers()
    return {each for layer in layers for each in optimizers_in(vars(layer))}


def forget_rates(optimizer: keras.optimizers.Optimizer) -> None:
    """Resets an optimizer's learning rates, for copies that never update.

    Keras cannot copy a schedule without `get_config`, or a user's own.
    """
    vars(optimizer)["_learning_rate"] = None
    for part in optimizers_in(vars(optimizer)):
        forget_rates(part)


def uses_weight_decay(
    optimizer: keras.optimizers.Optimizer, variable: keras.Variable
) -> bool:
    """Whether weight decay applies to `variable`; it may be excluded."""
    return optimizer._use_weight_decay(variable)


def nadam_product(optimizer: keras.optimizers.Nadam) -> keras.Variable:
    """The product of Nadam's momentum schedule so far."""
    return optimizer._u_product


def counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The variable that counts an optimizer's steps, behind `iterations`."""
    return getattr(optimizer, "inner_optimizer", optimizer)._iterations


class ColocatedZeros(keras.Variable):
    """Non-trainable zeros, created on another variable's device.

    Keras initializes variables later if a model is built without being run.
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
    """The package that has replaced `keras.Model.fit`, or ""."""
    scope = getattr(keras.Model.fit, "__globals__", {})
    package = scope.get("__name__", "keras").partition(".")[0]
    return "" if package == "keras" else package


def profiles(callback: keras.callbacks.TensorBoard) -> bool:
    """Whether a callback was given a `profile_batch`."""
    return callback._should_trace


def resume_at(
    callback: keras.callbacks.ModelCheckpoint, step: int, steps_per_epoch: int
) -> None:
    """Makes a callback that saves by batches count as if after `step` steps."""
    epoch, batches = divmod(step, steps_per_epoch)
    callback._current_epoch = epoch
    callback._batches_seen_since_last_saving = step % callback.save_freq
    # Infinity: the next batch is the first of an epoch. Keras 3.12 has no None.
    callback._last_batch_seen = batches - 1 if batches else math.inf


def part_index(optimizer: Any, variable: keras.Variable) -> int:
    """The index of the part of a built `MultiOptimizer` for `variable`."""
    return optimizer._var_to_optimizer_idx[optimizer._var_key(variable)]


def trained(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    return optimizer._trainable_variables


def loss_tracker(model: keras.Model) -> keras.metrics.Mean:
    """The loss metric that `compile` creates; others may have its name."""
    return model._loss_tracker


def mask_of(tensor: tf.Tensor) -> tf.Tensor | None:
    """The mask that a Keras layer has attached to its output, for a loss."""
    return getattr(tensor, "_keras_mask", None)


def set_mask(tensor: tf.Tensor, mask: tf.Tensor) -> None:
    """Attaches a mask to a tensor, where Keras looks for it."""
    tensor._keras_mask = mask


def py_dataset_batches(
    data: keras.utils.PyDataset, shuffle: bool
) -> Iterator[Any]:
    """Yields one pass over a `PyDataset`, loaded by its workers as in `fit`."""
    adapter = data_adapters.get_data_adapter(data, shuffle=shuffle)
    adapter.on_epoch_begin()
    with contextlib.ExitStack() as at_end:
        at_end.callback(adapter.on_epoch_end)
        for number, batch in enumerate(adapter.get_numpy_iterator(), 1):
            if number == adapter.num_batches:  # The caller may stop here.
                at_end.close()
            yield batch


def py_dataset_spec(data: keras.utils.PyDataset) -> Any:
    """The element spec of a `PyDataset`'s batches."""
    return data_adapters.get_data_adapter(data).get_tf_dataset().element_spec
