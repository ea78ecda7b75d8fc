"""Stages of a pipeline: layers and their devices."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import tensorflow as tf

from tfdist._tf.private_keras import SEED_STATE_NAME

Layers: TypeAlias = keras.layers.Layer | Sequence[keras.layers.Layer]
Devices = Sequence[str] | Sequence[Sequence[str]]


class Stage:
    """A sequence of layers on one device.

    Args:
        index: The number of the stage in the pipeline.
        layers: The layers. The attribute `layers` is a tuple.
        device: The full name of their variables' device; also an attribute.

    >>> from tfdist.pipeline import Pipeline
    >>> relu = keras.layers.ReLU(name="relu")
    >>> Pipeline(keras.Input([4]), [relu], ["CPU:0"]).stages
    (Stage(relu on /job:localhost/replica:0/task:0/device:CPU:0),)

    Raises:
        TypeError: an element of `layers` is not a layer.
        ValueError: `layers` is empty.
    """

    def __init__(self, index: int, layers: Layers, device: str) -> None:
        several = isinstance(layers, list | tuple)
        self.layers = tuple(layers) if several else (layers,)
        self.device = device
        if not self.layers:
            raise ValueError(
                "Argument `stages` must have a layer in each stage. Received: "
                f"an empty stage {index}."
            )
        for layer in self.layers:
            if not isinstance(layer, keras.layers.Layer):
                raise TypeError(
                    "Argument `stages` must hold Keras layers, or lists of "
                    f"them. Received: {layer!r} of type {type(layer).__name__} "
                    f"in stage {index}."
                )

    def __repr__(self) -> str:
        names = ", ".join(layer.name for layer in self.layers)
        return f"Stage({names} on {self.device})"

    @property
    def weights(self) -> list[keras.Variable]:
        """The variables that training updates."""
        own = [v for layer in self.layers for v in layer.trainable_variables]
        return list({id(v): v for v in own}.values())

    @property
    def states(self) -> list[keras.Variable]:
        """All other variables: moving averages, seeds, frozen weights."""
        trained = {id(v) for v in self.weights}
        own = {id(v): v for layer in self.layers for v in layer.variables}
        return [v for key, v in own.items() if key not in trained]

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Calls the layers; the caller opens the device scope."""
        # Keras records the arguments of a symbolic call, even None.
        known = {} if training is None else {"training": training}
        for layer in self.layers:
            inputs = layer(inputs, **known)
        return inputs

    @property
    def variables(self) -> list[keras.Variable]:
        """The weights, then the states."""
        return self.weights + self.states

    def values(self) -> list[tf.Tensor]:
        """Reads all variables, on the stage's device."""
        with tf.device(self.device):
            return [tf.convert_to_tensor(v.value) for v in self.variables]


def check_variables(stages: Sequence[Stage]) -> None:
    """Checks that variables belong to one stage, and are on its device."""
    first: dict[int, int] = {}
    for i, stage in enumerate(stages):
        for variable in stage.variables:
            if first.setdefault(id(variable), i) != i:
                raise ValueError(
                    "Argument `stages` must not share variables. Received: "
                    f"{variable.path!r} in stages {first[id(variable)]} and "
                    f"{i}. Put the layers that share it in the same stage."
                )
            # Seeds are created with their layer, before it is added to a stage.
            is_seed = variable.path.endswith(SEED_STATE_NAME)
            if variable.value.device != stage.device and not is_seed:
                raise ValueError(
                    f"Stage {i} must have its variables on {stage.device}. "
                    f"Received: {variable.path!r} on {variable.value.device}. "
                    "Pass layers without variables, or create the variables in "
                    f"`with tf.device({stage.device!r})`."
                )


def resolve_devices(
    devices: Devices | None, num_stages: int
) -> tuple[tuple[str, ...], ...]:
    """Returns the full names of a pipeline's devices, a row per replica."""
    if not num_stages:
        raise ValueError("Argument `stages` must have at least one stage.")
    here = tf.DeviceSpec.from_string(tf.zeros([]).device).replace(
        device_type=None, device_index=None
    )
    existing = [
        here.make_merged_spec(tf.DeviceSpec.from_string(device.name))
        for device in tf.config.list_logical_devices()
    ]
    names = [device.to_string() for device in existing]
    if devices is None:
        own = [d for d in existing if (d.job, d.task) == (here.job, here.task)]
        own = [d for d in own if d.device_type == "GPU"] or own
        used = min(len(own), num_stages)
        devices = [
            own[i * used // num_stages].to_string() for i in range(num_stages)
        ]
    is_row = all(isinstance(device, str) for device in devices)
    rows: Sequence[Any] = [devices] if is_row else devices
    for row in rows:
        if isinstance(row, str) or len(row) != num_stages:
            raise ValueError(
                "Argument `devices` must name a device for each of the "
                f"{num_stages} stages, in one list or in a list for each "
                f"replica. Received: {row!r} in devices={devices!r}."
            )
    return tuple(
        tuple(_existing(name, here, names) for name in row) for row in rows
    )


def op_devices(function: Any) -> dict[str, str]:
    """Maps `function name/op name` to the devices in a `ConcreteFunction`.

    Includes the functions that it calls. "" leaves the choice to TensorFlow:
    ops on a variable run on its device.
    """
    graph = function.graph.as_graph_def()
    called = [(f.signature.name, f.node_def) for f in graph.library.function]
    return {
        f"{name}/{node.name}": node.device
        for name, nodes in [(function.name, graph.node), *called]
        for node in nodes
    }


def _existing(name: str, here: tf.DeviceSpec, names: list[str]) -> str:
    """Returns the full name of a device."""
    with contextlib.suppress(ValueError):  # TensorFlow cannot parse it.
        spec = tf.DeviceSpec.from_string(name)
        if (full := here.make_merged_spec(spec).to_string()) in names:
            return full
    raise ValueError(
        f"Argument `devices` names {name!r}, which does not exist. Devices: "
        f"{', '.join(names)}."
    )
