"""Layers on different devices, in a pipeline of micro-batches.

A model too large for one device is cut into stages, each on a device of its
own: its variables, their optimizer slots and every op of the stage. By itself
that lets one device work at a time, so a batch goes through in micro-batches:
while the second stage has the first of them, the first stage has the next. All
go forward before any goes back, as in GPipe (Huang et al., 2019):

    stage 0   F0 F1 F2 F3                 B0 B1 B2 B3
    stage 1      F0 F1 F2 F3  loss  B0 B1 B2 B3

No code here sends a tensor. A stage is a `tf.device` scope of one graph, and
TensorFlow sends what another device needs, as it did for the translator of the
2017 lecture, one LSTM layer a device. So a device may as well be in another
process: `/job:worker/task:1/device:GPU:0`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from tfdist import optimizers
from tfdist._private import SEED_STATE_NAME

Gradient = tf.Tensor | tf.IndexedSlices | None
# Of one stage: values of the trainable variables, and of the others.
Values = tuple[list[tf.Tensor], list[tf.Tensor]]
# Inputs, targets and sample weights.
Batch = tuple[Any, Any, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device does without a break: a stage, for one micro-batch.

    Attributes:
        device: Full name of the device.
        replica: Index of the row of `devices`.
        stage: Index of the stage.
        micro_batch: Index among the micro-batches of the replica.
        forward: Whether it is the forward pass.
        start: Seconds since the first work of the batch began.
        end: Seconds since then.
    """

    device: str
    replica: int
    stage: int
    micro_batch: int
    forward: bool
    start: float = 0.0
    end: float = 0.0


class Pipeline(keras.Model):
    """A chain of stages, each on a device, trained in micro-batches.

    A Keras model: `fit`, `evaluate`, `predict`, `export`, `tfdist.Estimator`
    and checkpoints work. Training gives the weights that the same layers have
    on one device, but for rounding: loss and metrics are computed on the
    predictions for the whole batch, and the gradients of the micro-batches add
    up to its gradient. Three layers differ by nature: BatchNorm normalizes
    over a micro-batch, Dropout draws a mask for each, and what layers
    `add_loss` is the mean over them.

    With several rows of `devices` there are as many replicas, each with its
    share of the batch (in-graph replication). Variables and slots are on the
    devices of the first row; in every step the others get a copy of the values
    and send gradients back, which are added up there. The predictions of all
    replicas go to the first one's last device. What layers change themselves
    (moving averages) becomes the mean over replicas.

    The optimizer is applied by `tfdist.optimizers`; the gradient of an
    embedding is as large as its table.

    >>> model = Pipeline(
    ...     keras.Input([4]),
    ...     [keras.layers.Dense(8, "relu"), keras.layers.Dense(1)],
    ...     devices=["CPU:0", "CPU:0"],
    ...     num_micro_batches=2,
    ... )
    >>> model.compile("sgd", "mse")
    >>> x, y = keras.ops.ones([6, 4]), keras.ops.ones([6, 1])
    >>> loss = model.train_on_batch(x, y)

    Args:
        inputs: `keras.Input`, or a structure of them: what the first stage
            takes.
        stages: Each a layer, or a list of layers that follow one another; a
            Keras model is a layer too. Each takes what the one before returns,
            a tensor or a structure of them. Layers keep what they change in
            Keras variables; no variable is in two stages.
        devices: One for each stage, by a name that `tf.device` takes, also of
            another task of the cluster that
            `tf.config.experimental_connect_to_cluster` has joined; or a list
            of such lists, one for each replica. Default: the GPUs of this
            task, else its CPUs; where they are too few, neighbours share one.
        num_micro_batches: Into how many parts each replica cuts its share of
            the batch. The more, the less time devices wait (`bubble`), until
            a part is too small to keep one busy.
        name: Name of the model.

    Attributes:
        stages: Tuples of layers.
        devices: A tuple of full device names for each replica.
        num_micro_batches: As given.

    Raises:
        ValueError: there is no stage; as many devices as stages are not given;
            a device does not exist; a stage has variables on another device,
            or shares them with another stage; `num_micro_batches` is below 1;
            this is in the scope of a `tf.distribute` strategy.
        TypeError: a stage is no layer.
    """

    def __init__(
        self,
        inputs: Any,
        stages: Sequence[keras.layers.Layer | Sequence[keras.layers.Layer]],
        devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
        *,
        num_micro_batches: int = 4,
        name: str = "pipeline",
    ) -> None:
        if tf.distribute.has_strategy():
            raise ValueError(
                "A Pipeline does its own data parallelism, so it cannot be "
                "made in the scope of a strategy. Received: "
                f"{tf.distribute.get_strategy()!r}. Give `devices` a list for "
                "each replica instead."
            )
        if num_micro_batches < 1:
            raise ValueError(
                "Argument `num_micro_batches` must be positive. Received: "
                f"num_micro_batches={num_micro_batches}."
            )
        layers = _layers(stages)
        rows = resolve_devices(devices, len(layers))
        outputs = inputs
        for stage, device in zip(layers, rows[0], strict=True):
            with tf.device(device):  # Layers make their variables here.
                outputs = _call(stage, outputs)
        super().__init__(inputs=inputs, outputs=outputs, name=name)
        self.stages = layers
        self.devices = rows
        self.num_micro_batches = num_micro_batches
        self.supports_jit = False  # XLA compiles for one device.
        self._check_variables()

    @property
    def losses(self) -> list[tf.Tensor]:
        """Those of all layers, each computed on the device of its stage."""
        losses = []
        for stage, device in self._on_devices():
            with tf.device(device):
                losses += [loss for layer in stage for loss in layer.losses]
        return losses

    def call(
        self, inputs: Any, training: bool | None = None, mask: Any = None
    ) -> Any:
        """Runs the stages one after the other, on the batch as a whole."""
        del mask  # Layers find it with the tensors.
        for stage, device in self._on_devices():
            with tf.device(device):
                inputs = _call(stage, inputs, training)
        return inputs

    def train_step(self, data: Any) -> dict[str, tf.Tensor]:
        """Trains on a batch, as a pipeline; returns the logs.

        Raises:
            ValueError: the batch does not divide into micro-batches; the
                model is compiled with `jit_compile=True`, or an optimizer that
                `tfdist.optimizers.check` refuses.
            tf.errors.InvalidArgumentError: the batch does not divide, where
                its size is known no earlier.
        """
        if self.jit_compile:
            raise ValueError(
                "XLA compiles for one device, and a Pipeline has several. "
                "Received: jit_compile=True in `compile`."
            )
        optimizers.check(self.optimizer)
        with tf.init_scope():
            optimizers.build(self.optimizer, self.trainable_variables)
        batch = keras.utils.unpack_x_y_sample_weight(data)
        done = self._forward_and_back(batch, _Turns())
        with tf.device(self.devices[0][-1]):
            logs = self._logs(*batch, done)
        self._update(done.gradients)
        for (stage, device), states in zip(
            self._on_devices(), done.states, strict=True
        ):
            with tf.device(device):
                for i, value in states.items():
                    _variables(stage)[1][i].assign(value)
        return logs

    def timeline(self, data: Any) -> list[Work]:
        """Measures which device does what when, for one batch; trains nothing.

        The clock of the device's machine is read when the inputs of a work
        have arrived and its turn has come, and when its outputs are there. The
        clocks of several machines should agree. A GPU's work ends here when it
        is queued, not when it is done: there, use `tf.profiler`.

        Args:
            data: A batch, as for `train_step`.

        Returns:
            What was done, in the order of `start`.
        """
        turns = _Turns(timed=True)

        @tf.function(autograph=False)
        def passes() -> list[tf.Tensor]:
            batch = keras.utils.unpack_x_y_sample_weight(data)
            return self._forward_and_back(batch, turns).times

        passes()  # The first run also allocates.
        times = [float(time) for time in passes()]
        measured = [
            dataclasses.replace(
                work, start=start - min(times), end=end - min(times)
            )
            for work, start, end in zip(
                turns.work, times[::2], times[1::2], strict=True
            )
        ]
        return sorted(measured, key=lambda work: work.start)

    def variable_devices(self) -> dict[str, str]:
        """Path of every variable, slot and counter to its device."""
        variables = list(self.variables)
        if self.optimizer is not None:
            variables += self.optimizer.variables
        return {v.path: v.value.device for v in variables}

    def _on_devices(self) -> Iterator[tuple[tuple, str]]:
        """Each stage with the device of its variables."""
        return zip(self.stages, self.devices[0], strict=True)

    def _check_variables(self) -> None:
        """Raises unless every stage has its own variables on its device."""
        stage_of: dict[int, int] = {}
        for i, (stage, device) in enumerate(self._on_devices()):
            for variable in itertools.chain(*_variables(stage)):
                first = stage_of.setdefault(id(variable), i)
                if first != i:
                    raise ValueError(
                        "Argument `stages` must not share variables. Received: "
                        f"{variable.path!r} in stages {first} and {i}. Layers "
                        "that share one belong into one stage."
                    )
                # A seed is made with its layer, which may be anywhere.
                is_seed = variable.path.endswith(SEED_STATE_NAME)
                if variable.value.device != device and not is_seed:
                    raise ValueError(
                        f"Stage {i} must have its variables on {device}. "
                        f"Received: {variable.path!r} on "
                        f"{variable.value.device}. Pass layers that have no "
                        "variables yet, or make them in "
                        f"`with tf.device({device!r})`."
                    )

    def _forward_and_back(self, batch: Batch, turns: _Turns) -> _Result:
        """Runs both passes of a batch; changes no variable."""
        batch = (self._divisible(batch[0]), *batch[1:])
        values = []
        for stage, device in self._on_devices():
            with tf.device(device):
                values.append(
                    tuple(
                        [tf.convert_to_tensor(v.value) for v in variables]
                        for variables in _variables(stage)
                    )
                )
        passes = functools.partial(_passes, self, turns)
        return _in_any_order(passes, values, batch)

    def _divisible(self, x: Any) -> Any:
        """The inputs, if they can be cut."""
        parts = len(self.devices) * self.num_micro_batches
        first = tf.nest.flatten(x)[0]
        size = first.shape[0]
        message = (
            f"A batch must divide into {parts} parts: {len(self.devices)} "
            f"replicas x {self.num_micro_batches} micro-batches. Choose "
            "another `num_micro_batches`, or batch the dataset with "
            "`drop_remainder=True`."
        )
        if size is not None and size % parts:
            raise ValueError(f"{message} Received: a batch of {size}.")
        if size is None:
            rest = tf.shape(first)[0] % parts
            check = tf.debugging.assert_equal(rest, 0, message)
            with tf.control_dependencies([check]):
                x = tf.nest.map_structure(tf.identity, x)
        return x

    def _update(self, gradients: list[list[Gradient]]) -> None:
        """Applies each gradient on the device of its variable."""
        optimizer = self.optimizer
        parts = optimizers.parts(optimizer)
        iteration = tf.convert_to_tensor(optimizer.iterations.value)
        all_updates = [
            _Update(device, variable, gradient)
            for (stage, device), own in zip(
                self._on_devices(), gradients, strict=True
            )
            for variable, gradient in zip(
                _variables(stage)[0], own, strict=True
            )
            if gradient is not None
        ]
        for i, part in enumerate(parts):
            updates = [
                u
                for u in all_updates
                if optimizers.owner(optimizer, u.variable) == i
            ]
            rate = optimizers.learning_rate(part, iteration, [])
            optimizers.begin_step(part, iteration)
            for device, variable, gradient in _clipped(part, updates):
                with tf.device(device):
                    optimizers.update(part, variable, gradient, rate, iteration)
        counters = [o.iterations for o in (optimizer, *parts)]
        for counter in {id(c): c for c in counters}.values():
            counter.assign_add(1)

    def _logs(
        self, x: Any, y: Any, sample_weight: Any, done: _Result
    ) -> dict[str, tf.Tensor]:
        """Loss and metrics of the whole batch, as Keras computes them."""
        _set_masks(done.y_pred, done.masks)
        loss = self.compute_loss(
            x, y, done.y_pred, sample_weight, training=True
        )
        mean_loss = next(m for m in self.metrics if m.name == "loss")
        mean_loss.update_state(
            loss + tf.cast(done.added_loss, loss.dtype),
            sample_weight=tf.shape(tf.nest.flatten(x)[0])[0],
        )
        return self.compute_metrics(x, y, done.y_pred, sample_weight)


def bubble(num_stages: int, num_micro_batches: int) -> float:
    """Share of its time that a device waits, if all stages take equally long.

    Each of S stages does its M micro-batches in a row and waits while the
    first of them comes and the last one goes: `(S - 1) / (M + S - 1)`.

    >>> [round(bubble(2, m), 2) for m in (1, 2, 4, 8)]
    [0.5, 0.33, 0.2, 0.11]
    """
    return (num_stages - 1) / (num_micro_batches + num_stages - 1)


def op_devices(function: Any) -> dict[str, str]:
    """The device that each op of a traced function asks for.

    Args:
        function: A `ConcreteFunction`, as of `model.train_function`.

    Returns:
        `function name/op name` to device, of ops in nested functions too (the
        body of a loop); "" where TensorFlow chooses.
    """
    graph = function.graph.as_graph_def()
    nested = [(f.signature.name, f.node_def) for f in graph.library.function]
    return {
        f"{name}/{node.name}": node.device
        for name, nodes in [(function.name, graph.node), *nested]
        for node in nodes
    }


def resolve_devices(
    devices: Sequence[str] | Sequence[Sequence[str]] | None, num_stages: int
) -> tuple[tuple[str, ...], ...]:
    """Full names of a `Pipeline`'s devices, a row for each replica.

    Args:
        devices: As for `Pipeline`.
        num_stages: Devices in a row.

    Raises:
        ValueError: a row has another length; a device does not exist.
    """
    here = tf.DeviceSpec.from_string(tf.zeros([]).device).replace(
        device_type=None, device_index=None
    )
    existing = [
        here.make_merged_spec(tf.DeviceSpec.from_string(device.name))
        for device in tf.config.list_logical_devices()
    ]
    if devices is None:
        own = [d for d in existing if (d.job, d.task) == (here.job, here.task)]
        own = [d for d in own if d.device_type == "GPU"] or own
        used = min(len(own), num_stages)
        row = [own[i * used // num_stages] for i in range(num_stages)]
        return (tuple(device.to_string() for device in row),)
    rows = [devices] if all(isinstance(d, str) for d in devices) else devices
    for row in rows:
        if isinstance(row, str) or len(row) != num_stages:
            raise ValueError(
                "Argument `devices` must name a device for each of the "
                f"{num_stages} stages, in one list or in a list for each "
                f"replica. Received: {row!r} in devices={devices!r}."
            )
    names = [device.to_string() for device in existing]
    return tuple(
        tuple(_existing(name, here, names) for name in row) for row in rows
    )


def _existing(name: str, here: tf.DeviceSpec, names: list[str]) -> str:
    """The full name of a device. TensorFlow would silently take another."""
    with contextlib.suppress(ValueError):  # It is no device name.
        spec = tf.DeviceSpec.from_string(name)
        if (full := here.make_merged_spec(spec).to_string()) in names:
            return full
    raise ValueError(
        f"Argument `devices` names {name!r}, which does not exist. There are: "
        f"{', '.join(names)}."
    )


def _layers(
    stages: Sequence[Any],
) -> tuple[tuple[keras.layers.Layer, ...], ...]:
    """The layers of each stage."""
    layers = tuple(
        tuple(stage) if isinstance(stage, list | tuple) else (stage,)
        for stage in stages
    )
    for i, stage in enumerate(layers):
        for layer in stage:
            if not isinstance(layer, keras.layers.Layer):
                raise TypeError(
                    "Argument `stages` must hold Keras layers, or lists of "
                    f"them. Received: {layer!r} of type {type(layer).__name__} "
                    f"in stage {i}."
                )
    if not layers or not all(layers):
        raise ValueError(
            "Argument `stages` must hold a layer at least, and no empty list. "
            f"Received: stages={stages!r}."
        )
    return layers


def _call(
    stage: tuple[keras.layers.Layer, ...],
    inputs: Any,
    training: bool | None = None,
) -> Any:
    for layer in stage:
        inputs = layer(inputs, training=training)
    return inputs


def _variables(
    stage: tuple[keras.layers.Layer, ...],
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """Those that training updates, and those that layers update themselves."""
    own = {id(v): v for layer in stage for v in layer.variables}
    trainable = {id(v): v for layer in stage for v in layer.trainable_variables}
    return (
        list(trainable.values()),
        [v for key, v in own.items() if key not in trainable],
    )


# --- The update --------------------------------------------------------------


class _Update(NamedTuple):
    device: str
    variable: keras.Variable
    gradient: Gradient


def _clipped(
    part: keras.optimizers.Optimizer, updates: list[_Update]
) -> list[_Update]:
    """With gradients that are dense, and clipped as the optimizer says."""
    clipped = []
    for device, _, gradient in updates:
        with tf.device(device):
            gradient = tf.convert_to_tensor(gradient)
            if not part.global_clipnorm:
                (gradient,) = optimizers.clip(part, [gradient])
            elif part.loss_scale_factor is not None:
                gradient /= part.loss_scale_factor
        clipped.append(gradient)
    if part.global_clipnorm and clipped:
        # Each is scaled where it is; only norms meet.
        clipped, _ = tf.clip_by_global_norm(clipped, part.global_clipnorm)
    return [
        update._replace(gradient=gradient)
        for update, gradient in zip(updates, clipped, strict=True)
    ]


# --- The passes, as a function of the values of all variables ----------------


class _Result(NamedTuple):
    """What both passes of a batch give.

    Attributes:
        gradients: Of each stage's trainable variables.
        states: Of each stage, index to new value of its other variables, if
            they have changed.
        y_pred: Predictions for the whole batch.
        masks: Keras' mask of each of them, or None.
        added_loss: What layers have added, a scalar.
        times: Start and end of all work, in turn, if `_Turns` are timed.
    """

    gradients: list[list[Gradient]]
    states: list[dict[int, tf.Tensor]]
    y_pred: Any
    masks: list[tf.Tensor | None]
    added_loss: tf.Tensor
    times: list[tf.Tensor]


class _Turns:
    """Has each device do one work after the other, as the schedule says.

    Else it would begin all that it can, and the first micro-batch would leave
    the first stage as late as the last one.

    Args:
        timed: Whether to read the clock.

    Attributes:
        work: What was traced.
        times: Start and end of each.
    """

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._last: dict[str, list[tf.Tensor]] = {}
        self.work: list[Work] = []
        self.times: list[tf.Tensor] = []

    @contextlib.contextmanager
    def turn(self, work: Work, needed: Any) -> Iterator[list[Any]]:
        """Traces a work on its device, after the one before.

        Args:
            work: What will be traced.
            needed: Structure of tensors that the work waits for.

        Yields:
            A list to which the caller adds what the work gives.
        """
        given: list[Any] = []
        self.work.append(work)
        with tf.device(work.device):
            with tf.control_dependencies(self._last.get(work.device, [])):
                start = self._now(needed)
                with tf.control_dependencies(start):
                    yield given
            self._last[work.device] = _tensors(given) + self._now(given)

    def _now(self, needed: Any) -> list[tf.Tensor]:
        """The time when all that is needed is there, if it is asked for."""
        if not self._timed:
            return []
        with tf.control_dependencies(_tensors(needed)):
            time = tf.timestamp()
        self.times.append(time)
        return [time]


class _Forward(NamedTuple):
    """What the backward pass of a stage needs of the forward pass."""

    tape: tf.GradientTape
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    losses: list[tf.Tensor]


class _Replica:
    """One copy of the pipeline, at work on its share of a batch.

    Gradients are taken stage by stage: the backward ops of a single tape would
    all be on one device.

    Args:
        model: The pipeline.
        index: Row of `model.devices`.
        values: Values of the variables of each stage.
        turns: Keeps the devices in order.
        weight: Of a loss that a layer adds for one micro-batch.

    Attributes:
        states: Of each stage, values of the variables that its layers change.
        gradients: Of each stage, the sum so far for its trainable variables.
        losses: What layers have added, for each micro-batch and stage.
    """

    def __init__(
        self,
        model: Pipeline,
        index: int,
        values: list[Values],
        turns: _Turns,
        weight: tf.Tensor,
    ) -> None:
        self._model = model
        self._index = index
        self._turns = turns
        self._weight = weight
        self._weights: list[list[tf.Tensor]] = []
        self._kept: dict[tuple[int, int], _Forward] = {}
        self.states: list[list[tf.Tensor]] = []
        self.gradients: list[list[Gradient]] = []
        self.losses: list[tf.Tensor] = []
        for stage, device, (weights, states) in zip(
            model.stages, model.devices[index], values, strict=True
        ):
            if index:
                with tf.device(device):
                    weights = [tf.identity(value) for value in weights]
                    states = [
                        _state_of_replica(variable, value, index)
                        for variable, value in zip(
                            _variables(stage)[1], states, strict=True
                        )
                    ]
            self._weights.append(weights)
            self.states.append(list(states))
            self.gradients.append([None] * len(weights))

    def forward(self, micro_batch: int, x: Any) -> Any:
        """Runs all stages for a micro-batch; returns the predictions."""
        for stage in range(len(self._weights)):
            x = self._stage_forward(stage, micro_batch, x)
        return x

    def backward(self, micro_batch: int, gradients: list[Gradient]) -> None:
        """Adds a micro-batch to `gradients`, given those of its predictions."""
        for stage in reversed(range(len(self._weights))):
            gradients = self._stage_backward(stage, micro_batch, gradients)

    def _turn(
        self, stage: int, micro_batch: int, forward: bool, needed: Any
    ) -> contextlib.AbstractContextManager[list[Any]]:
        device = self._model.devices[self._index][stage]
        work = Work(device, self._index, stage, micro_batch, forward)
        return self._turns.turn(work, needed)

    def _stage_forward(self, stage: int, micro_batch: int, inputs: Any) -> Any:
        layers, weights = self._model.stages[stage], self._weights[stage]
        trainable, others = _variables(layers)
        sources = _floats(inputs) if stage else []
        scope = keras.StatelessScope(
            [
                *zip(trainable, weights, strict=True),
                *zip(others, self.states[stage], strict=True),
            ],
            collect_losses=True,
        )
        tape = tf.GradientTape(watch_accessed_variables=False)
        with self._turn(stage, micro_batch, True, inputs) as given:
            with tape, scope:
                tape.watch([*weights, *sources])
                outputs = _call(layers, inputs, training=True)
            given.append(outputs)
        self.states[stage] = [scope.get_current_value(v) for v in others]
        losses = list(scope.losses)
        self.losses += losses
        self._kept[stage, micro_batch] = _Forward(
            tape, sources, _floats(outputs), losses
        )
        return outputs

    def _stage_backward(
        self, stage: int, micro_batch: int, gradients: list[Gradient]
    ) -> list[Gradient]:
        """Returns the gradients of the inputs, given those of the outputs."""
        tape, inputs, outputs, losses = self._kept.pop((stage, micro_batch))
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None
        ]
        if not (pairs or losses):
            return [None] * len(inputs)
        weights = self._weights[stage]
        needed = [gradient for _, gradient in pairs]
        with self._turn(stage, micro_batch, False, needed) as given:
            pairs += [(x, tf.cast(self._weight, x.dtype)) for x in losses]
            targets, seeds = zip(*pairs, strict=True)
            found = tape.gradient(
                targets, [*weights, *inputs], output_gradients=seeds
            )
            self.gradients[stage] = [
                _sum(*both)
                for both in zip(
                    self.gradients[stage], found[: len(weights)], strict=True
                )
            ]
            given += [self.gradients[stage], found[len(weights) :]]
        return found[len(weights) :]


def _passes(
    model: Pipeline, turns: _Turns, values: list[Values], batch: Batch
) -> _Result:
    """The forward and the backward pass of a batch."""
    x, y, sample_weight = batch
    num_parts = len(model.devices) * model.num_micro_batches
    weight = model.optimizer.scale_loss(tf.constant(1 / num_parts))
    replicas = [
        _Replica(model, i, values, turns, weight)
        for i in range(len(model.devices))
    ]
    turns_of = list(itertools.product(replicas, range(model.num_micro_batches)))
    with tf.device("CPU:0"):  # Where it was read; only parts are sent.
        parts = _split(x, num_parts)
    y_preds = [
        replica.forward(k, part)
        for (replica, k), part in zip(turns_of, parts, strict=True)
    ]
    with tf.device(model.devices[0][-1]):
        y_pred, masks = _joined(y_preds)
        loss = functools.partial(
            _loss, model, values, x, y, y_pred, sample_weight
        )
        cut = _split(_gradients(loss, _floats(y_pred)), num_parts)
    for (replica, k), gradients in zip(turns_of, cut, strict=True):
        replica.backward(k, gradients)
    with tf.device(model.devices[0][-1]):
        added = [tf.cast(x, tf.float32) for r in replicas for x in r.losses]
        added_loss = tf.add_n([tf.zeros([]), *added]) / num_parts
    gradients, states = zip(
        *(
            _over_replicas(model, stage, own, replicas)
            for stage, own in enumerate(values)
        ),
        strict=True,
    )
    return _Result(
        list(gradients), list(states), y_pred, masks, added_loss, turns.times
    )


def _loss(
    model: Pipeline,
    values: list[Values],
    x: Any,
    y: Any,
    y_pred: Any,
    sample_weight: Any,
) -> tf.Tensor:
    """What `compile` says of the predictions, scaled for the backward pass."""
    known = [
        pair
        for stage, own in zip(model.stages, values, strict=True)
        for pair in zip(
            itertools.chain(*_variables(stage)),
            itertools.chain(*own),
            strict=True,
        )
    ]
    # Metrics that a loss updates wait for `Pipeline._logs`.
    with keras.StatelessScope(known):
        loss = model.compute_loss(x, y, y_pred, sample_weight, training=True)
    return model.optimizer.scale_loss(loss)


def _over_replicas(
    model: Pipeline, stage: int, values: Values, replicas: list[_Replica]
) -> tuple[list[Gradient], dict[int, tf.Tensor]]:
    """Sum of a stage's gradients, and its new states, on its device."""
    trainable, others = _variables(model.stages[stage])
    weights, states = values
    with tf.device(model.devices[0][stage]):
        penalty = functools.partial(
            _penalty, model, [v.regularizer for v in trainable], weights
        )
        gradients = [
            functools.reduce(_sum, own)
            for own in zip(
                _gradients(penalty, weights),
                *(replica.gradients[stage] for replica in replicas),
                strict=True,
            )
        ]
        changed = {
            i: _mean([replica.states[stage][i] for replica in replicas])
            for i in range(len(others))
            if replicas[0].states[stage][i] is not states[i]
        }
    return gradients, changed


def _penalty(
    model: Pipeline, regularizers: list[Any], weights: list[tf.Tensor]
) -> tf.Tensor:
    """Regularization loss of a stage, scaled for the backward pass."""
    penalties = [
        regularizer(value)
        for regularizer, value in zip(regularizers, weights, strict=True)
        if regularizer is not None
    ]
    return model.optimizer.scale_loss(tf.add_n([tf.zeros([]), *penalties]))


def _gradients(
    loss: Callable[[], tf.Tensor], sources: list[tf.Tensor]
) -> list[Gradient]:
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(sources)
        value = loss()
    return tape.gradient(value, sources)


def _state_of_replica(
    variable: keras.Variable, value: tf.Tensor, index: int
) -> tf.Tensor:
    """What a replica but the first starts with; it draws other numbers."""
    if variable.path.endswith(SEED_STATE_NAME):
        seed = tf.random.fold_in(tf.cast(value, tf.int64), index)
        return tf.cast(seed, value.dtype)
    return tf.identity(value)


def _mean(values: list[tf.Tensor]) -> tf.Tensor:
    """Mean over replicas; a counter or a seed is that of the first one."""
    if len(values) == 1 or not values[0].dtype.is_floating:
        return values[0]
    return tf.add_n(values) / len(values)


def _sum(a: Gradient, b: Gradient) -> Gradient:
    if a is None or b is None:
        return b if a is None else a
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        return tf.IndexedSlices(
            tf.concat([a.values, b.values], axis=0),
            tf.concat([a.indices, b.indices], axis=0),
            a.dense_shape,
        )
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


# --- Structures of tensors ---------------------------------------------------


def _tensors(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in flat if t is not None]


def _floats(structure: Any) -> list[tf.Tensor]:
    """Those that have a gradient."""
    return [t for t in tf.nest.flatten(structure) if t.dtype.is_floating]


def _split(structure: Any, num_parts: int) -> list[Any]:
    """As many structures, of equal parts along axis 0; None stays."""
    cut = [
        [None] * num_parts if t is None else tf.split(t, num_parts)
        for t in tf.nest.flatten(structure)
    ]
    return [
        tf.nest.pack_sequence_as(structure, part)
        for part in zip(*cut, strict=True)
    ]


def _joined(parts: list[Any]) -> tuple[Any, list[tf.Tensor | None]]:
    """The structure of which these are the parts, and its masks."""
    columns = list(zip(*(tf.nest.flatten(p) for p in parts), strict=True))
    masks = [
        None
        if _mask(column[0]) is None
        else tf.concat([_mask(t) for t in column], axis=0)
        for column in columns
    ]
    whole = tf.nest.pack_sequence_as(
        parts[0], [tf.concat(column, axis=0) for column in columns]
    )
    _set_masks(whole, masks)
    return whole, masks


def _mask(tensor: tf.Tensor) -> tf.Tensor | None:
    return getattr(tensor, "_keras_mask", None)


def _set_masks(structure: Any, masks: list[tf.Tensor | None]) -> None:
    for tensor, mask in zip(tf.nest.flatten(structure), masks, strict=True):
        if mask is not None:
            tensor._keras_mask = mask


def _in_any_order(function: Callable[..., _Result], *args: Any) -> _Result:
    """Calls `function` such that ops wait for what they need, and no more.

    `tf.function` also has stateful ops wait for one another in the order of
    the program. The LSTM of cuDNN is such an op, and so is the clock: no two
    stages would work at the same time. A wrapped function has no such order.
    """
    if tf.executing_eagerly():
        return function(*args)
    flat = tf.nest.flatten(args, expand_composites=True)

    def traced(*tensors: tf.Tensor) -> _Result:
        remaining = iter(tensors)
        filled = [None if t is None else next(remaining) for t in flat]
        return function(
            *tf.nest.pack_sequence_as(args, filled, expand_composites=True)
        )

    tensors = [tf.convert_to_tensor(t) for t in flat if t is not None]
    specs = [tf.TensorSpec.from_tensor(t) for t in tensors]
    return tf.compat.v1.wrap_function(traced, specs)(*tensors)
