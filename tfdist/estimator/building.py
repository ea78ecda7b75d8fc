"""Builds the variables, step and loop of a job in the strategy's scope."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import os
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_callable
from tfdist._tf.private_checkpoints import Saveable
from tfdist._tf.private_keras import assigned, leave_strategy, own_object_names
from tfdist.checkpoint import checkpoints
from tfdist.cluster import servers
from tfdist.cluster.peers import Peers
from tfdist.cluster.strategies import SYNCHRONOUS, check_tpu, group_of
from tfdist.data import input_fns
from tfdist.data.input_fns import InputFn
from tfdist.data.worker_context import GroupContext
from tfdist.estimator import results
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.warm_start import WarmStartHook
from tfdist.placement.scope import placed_scope, placement_by_name
from tfdist.placement.variables import VariableSpec, describe
from tfdist.session.trainable import Trainable
from tfdist.training import compiled_model, optimizers
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.keras_step import KerasStep
from tfdist.training.loop import LocalLoop, Loop
from tfdist.training.replicas import Replicas
from tfdist.training.replicated_loop import ReplicatedLoop
from tfdist.training.step import ModelStep
from tfdist.training.synchronous_loop import SynchronousLoop

_log = logging.getLogger(__name__)

ModelFn = Callable[[], keras.Model]

_ELEMENT_SPEC = "element_spec"
# Types of an optimizer's hyperparameters.
_PLAIN = bool | int | float | str | None
_SIZES = {
    tf.data.INFINITE_CARDINALITY: "infinite",
    tf.data.UNKNOWN_CARDINALITY: "unknown",
}
# The types of variables that TensorFlow's collectives broadcast.
_SENT = ("bool", "float16", "float32", "float64", "int32", "int64")


def check_model_fn(model_fn: ModelFn) -> None:
    """Raises `TypeError` for a model, or a TF1 `model_fn` with arguments."""
    check_callable("model_fn", model_fn)
    if isinstance(model_fn, keras.Model):
        raise TypeError(
            "Argument `model_fn` must be a function that returns a compiled "
            "model, since each task builds its own. Received: the model "
            f"{model_fn.name!r}."
        )
    signature = inspect.signature(model_fn)
    try:
        signature.bind()
    except TypeError:
        raise TypeError(
            "Argument `model_fn` must be a function without arguments that "
            "returns a compiled Keras model. Received a function of "
            f"{signature}. Bind arguments with `functools.partial`; for TF1's "
            "features, labels and mode, see tfdist/MIGRATION.md."
        ) from None


def build(
    model_fn: ModelFn,
    config: RunConfig,
    strategy: tf.distribute.Strategy,
    input_fn: InputFn,
) -> Trainable:
    """Builds everything that training needs in the strategy's scope."""
    context = GroupContext(num_replicas_in_sync=strategy.num_replicas_in_sync)
    if config.strategy_name == "multi_worker_mirrored":
        dataset, context = _same_as_others(model_fn, config, strategy, input_fn)
    else:
        dataset = input_fns.with_context(input_fn)(context)
    with input_fns.named(input_fn):
        global_step, model = create_variables(
            model_fn, config, strategy, dataset.element_spec
        )
        step, loop = _step_and_loop(
            config, strategy, model, global_step, dataset, input_fn, context
        )
    variables = step.variables(checkpoints.named_variables(model, global_step))
    if isinstance(strategy, tf.distribute.TPUStrategy):
        assert isinstance(step, ModelStep)
        check_tpu(dataset.element_spec, step.tables)
    tasks = _log_placement(variables)
    min_ps = 1 if isinstance(config.placement, str) else 1 + max(tasks)
    trained_on = compiled_model.element_spec_of(model)
    if trained_on is not None and config.cluster.is_chief:
        # An empty dataset stores the element spec alone.
        dataset.take(0).save(os.path.join(config.model_dir, _ELEMENT_SPEC))
    return Trainable(loop, global_step, variables, model=model, min_ps=min_ps)


def trained_element_spec(model_dir: str) -> Any:
    """Returns the spec a job's model was built from; None if none was saved."""
    path = os.path.join(model_dir, _ELEMENT_SPEC)
    exists = tf.io.gfile.exists(path)
    return tf.data.Dataset.load(path).element_spec if exists else None


def make_model(
    model_fn: ModelFn, element_spec: Any, targets: bool = True
) -> tuple[keras.Model, bool]:
    """Returns the model, and whether `model_fn` assigned weights to it."""
    with own_object_names(), assigned() as given:
        model = compiled_model.checked_model(model_fn(), element_spec, targets)
    return model, any(variable.trainable for variable in given)


def fill(
    model: keras.Model, path: str | None, warm_start: WarmStartHook | None
) -> dict[str, Saveable]:
    """Assigns weights from a checkpoint or, without one, from a warm start.

    Returns the model's variables by name.
    """
    variables = checkpoints.named_variables(model, optimizer=False)
    if path:
        checkpoints.restore(path, variables)
        results.warn_of_left_out(path, variables)
    elif warm_start:
        warm_start.assign(model, variables)
    return variables


def seed_initializers(config: RunConfig) -> None:
    """Seeds the random generators that the initializers use."""
    if config.tf_random_seed is None:
        return
    seed = int(config.tf_random_seed)  # It may be one of NumPy's.
    if config.cluster.role == "local":
        keras.utils.set_random_seed(seed)
    else:
        # TensorFlow's global seed would make every worker shuffle alike.
        random.seed(seed)
        np.random.seed(seed)


def create_variables(
    model_fn: ModelFn,
    config: RunConfig,
    strategy: tf.distribute.Strategy,
    element_spec: Any,
    targets: bool = True,
) -> tuple[tf.Variable, keras.Model]:
    """Creates the step counter, on the first ps as in TF1, and the model."""

    def made() -> keras.Model:
        with input_fns.unnamed():
            model = model_fn()
        return compiled_model.checked_model(model, element_spec, targets)

    num_ps, placement = servers.num_ps(strategy), config.placement
    specs: Sequence[VariableSpec] = ()
    if num_ps and placement != "round_robin":
        specs = describe(made)
    if isinstance(placement, str):
        placement = placement_by_name(placement, specs, num_ps or 1)
    first = tf.VariableAggregation.ONLY_FIRST_REPLICA
    with placed_scope(strategy, num_ps=num_ps):
        global_step = tf.Variable(
            np.int64(0), trainable=False, name="global_step", aggregation=first
        )
    scope = placed_scope(
        strategy, num_ps=num_ps, placement=placement, specs=specs
    )
    created: list[tf.Variable] = []

    def note(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        created.append(next_creator(**kwargs))
        return created[-1]

    with own_object_names(), scope, tf.variable_creator_scope(note):
        model = made()
        _warn_of_others_variables(model, {id(v) for v in created})
        made_here = strategy.extended.variable_created_in_scope
        for variable in model.variables:
            if not made_here(variable.value):
                raise ValueError(
                    f"The model function returned model {model.name!r} with "
                    f"variable {variable.path!r}, which was not created in the "
                    "strategy's scope. Create the model, and all of its "
                    "layers, inside the model function."
                )
        if not all(made_here(v.value) for v in model.optimizer.variables):
            # The program created the optimizer outside the strategy's scope.
            compiled_model.renew_optimizer(model)
        optimizers.build(model.optimizer, model.trainable_variables)
    leave_strategy(model)
    return global_step, model


def _warn_of_others_variables(model: keras.Model, created: set[int]) -> None:
    """Warns if the model trains variables that `model_fn` did not create.

    Their values may be left over from an earlier job in this process.
    """
    old = [v for v in model.trainable_variables if id(v.value) not in created]
    if old:
        _log.warning(
            "The model function returned model %r with %d trainable variables "
            "that it did not create, such as %r. They keep their current "
            "values, even if another job in this process has trained them, "
            "and cannot be trained on a cluster. Create the model, and all of "
            "its layers, inside the model function.",
            model.name,
            len(old),
            old[0].path,
        )


def _step_and_loop(
    config: RunConfig,
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    global_step: tf.Variable,
    dataset: tf.data.Dataset,
    input_fn: InputFn,
    context: GroupContext,
) -> tuple[ModelStep | KerasStep, Loop]:
    """Creates the step and loop; uses a custom `train_step` if possible."""
    spec, per_dispatch = dataset.element_spec, config.steps_per_dispatch
    if config.strategy_name == "ps":
        step = ModelStep(model, spec, global_step=global_step, remote=True)
        backup = config.backup_workers
        make: Callable[..., Loop] = partial(
            CoordinatedLoop,
            max_staleness=config.max_staleness,
            read_ahead=config.read_ahead or 0,
        )
        if backup is not None:
            make = partial(SynchronousLoop, backup_workers=backup)
        return step, make(
            step,
            global_step,
            input_fns.with_context(input_fn),
            strategy=strategy,
            num_workers=servers.num_connected("worker"),
            steps_per_dispatch=per_dispatch,
            example=dataset,
        )
    if isinstance(strategy, SYNCHRONOUS):
        replicas = Replicas(strategy, global_step)
        step = ModelStep(
            model, spec, global_step=global_step, replicas=replicas
        )
        return step, ReplicatedLoop(
            step,
            global_step,
            dataset,
            strategy=strategy,
            replicas=replicas,
            own_batches=input_fns.takes_context(input_fn),
            context=context,
            steps_per_dispatch=per_dispatch,
        )
    own_step = compiled_model.overrides(model, "train_step")
    kind = KerasStep if own_step else ModelStep
    local = kind(model, spec, global_step=global_step)
    return local, LocalLoop(local, global_step, dataset, per_dispatch)


def _same_as_others(
    model_fn: ModelFn,
    config: RunConfig,
    strategy: tf.distribute.Strategy,
    input_fn: InputFn,
) -> tuple[tf.data.Dataset, GroupContext]:
    """Returns an all-reduce process's dataset and its input context.

    All processes shuffle global batches alike; if `input_fn` takes a context,
    each reads its own. Raises `ValueError` if their programs differ.
    """
    group = group_of(strategy)
    peers, tasks = Peers(group), list(group.addresses())
    index, own = tasks.index(peers.name), input_fns.takes_context(input_fn)
    seed = given = _seed(config)
    if given is None:
        seed = random.SystemRandom().randrange(1 << 30)
    seed = int(peers.broadcast_from_leader("seed", str(seed)))
    keras.utils.set_random_seed(seed)
    # Own data are in the same order everywhere if `shuffle` has a seed, so that
    # they can be sharded then. Without one the order is each process's own.
    if own and given is None:
        tf.random.set_seed(None)
    elif own:
        for _ in range(index):
            tf.compat.v1.get_seed(None)  # Draws a seed for one.
    context = GroupContext(
        len(tasks),
        index,
        strategy.num_replicas_in_sync,
        # A smaller group redistributes the data, starting with another pass.
        first_pass=len(config.cluster.addresses()) - len(tasks),
    )
    replicas = len(strategy.extended.worker_devices)
    program = {"number of replicas": str(replicas)}
    with peers.failing_together():
        dataset = input_fns.with_context(input_fn)(context)
        if not own:
            options = tf.data.Options()
            options.deterministic = True  # Or the orders would differ.
            dataset = dataset.with_options(options)
            size = int(dataset.cardinality())
            program["number of batches"] = _SIZES.get(size, str(size))
        program |= {
            "batch": str(dataset.element_spec),
            "steps_per_dispatch": str(config.steps_per_dispatch),
            **_described(model_fn, dataset.element_spec),
        }
    if given is None:
        tf.random.set_seed(None)
    peers.check_same_program(program)
    if not own:
        _warn_of_other_batches(peers, dataset)
    return dataset, context


def _seed(config: RunConfig) -> int | None:
    """The seed of the job, or of `tf.random.set_seed`; None: neither is set."""
    if config.tf_random_seed is not None:
        return int(config.tf_random_seed)
    return tf.compat.v1.get_seed(None)[0]


def _described(model_fn: ModelFn, spec: Any) -> dict[str, str]:
    """Returns what a model consists of; every process must have the same."""
    program = {}

    def without_slots() -> keras.Model:
        model = compiled_model.checked_model(model_fn(), spec)
        for part in optimizers.parts(model.optimizer):
            rate = float(part.learning_rate)
            program[f"learning rate of {part.name}"] = f"{rate:g}"
            for name, value in vars(part).items():
                if isinstance(value, _PLAIN) and not name.startswith("_"):
                    program[f"{name} of {part.name}"] = str(value)
        model.optimizer = None
        return model

    variables = describe(without_slots)
    for v in variables:
        program[f"variable {v.name}"] = f"{v.dtype} {v.shape}"
    unsent = [
        f"{v.name} ({v.dtype})" for v in variables if v.dtype not in _SENT
    ]
    if unsent:
        raise ValueError(
            "The processes of an all-reduce job begin with the values of one, "
            f"but TensorFlow cannot send variables of these types: {unsent}. "
            "Use `mixed_bfloat16`, whose weights are float32, quantize the "
            "model after training, or use parameter servers."
        )
    return program


def _log_placement(variables: Mapping[str, Saveable]) -> set[int]:
    """Logs the number of variables per task; returns the tasks' indices."""
    held: dict[str, list[int]] = defaultdict(list)
    for variable in itertools.chain.from_iterable(
        getattr(v, "variables", [v]) for v in variables.values()
    ):
        device = tf.DeviceSpec.from_string(variable.device)
        remote = device.job not in (None, "localhost")
        task = f"{device.job}:{device.task}" if remote else "This process"
        size = variable.dtype.size * (variable.shape.num_elements() or 0)
        held[task].append(size)
    lines = (
        f"{task} holds {len(sizes)} variables, {sum(sizes) / 1e3:,.2f} kB"
        for task, sizes in sorted(held.items())
    )
    _log.info("%s.", "; ".join(lines))
    return {int(task.partition(":")[2] or 0) for task in held}


def _may_be_read(dataset: tf.data.Dataset) -> bool:
    """Whether reading a batch leaves a dataset as it is: it has no `cache`.

    How much of one is filled would decide the order of each process.
    """
    data = tf.data.experimental
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=data.to_variant(dataset),
            external_state_policy=data.ExternalStatePolicy.IGNORE.value,
        ).numpy()
    except tf.errors.OpError:  # Not all datasets have a graph.
        return False
    # Of arrays of 2 GB and more, TensorFlow returns nothing.
    return bool(graph) and b"CacheDataset" not in graph


def _warn_of_other_batches(peers: Peers, dataset: tf.data.Dataset) -> None:
    """Warns if the processes' first global batches differ."""
    digest = hashlib.sha256()
    with peers.failing_together():
        for batch in dataset.take(int(_may_be_read(dataset))):
            for part in tf.nest.flatten(batch, expand_composites=True):
                # Not `tobytes`, which returns addresses for string arrays.
                digest.update(part.numpy().dumps())
    peers.announce("batch", digest.hexdigest())
    if not peers.leads:
        return
    others = peers.wait_for_others("batch")
    differ = [n for n, d in others.items() if d != digest.hexdigest()]
    if differ:
        _log.warning(
            "The first global batch of %s differs from that of %s. Each "
            "process takes its share of every batch, so examples are repeated "
            "and skipped. The input function must read the same everywhere (no "
            "sharding, seeds for shuffling outside TensorFlow), or take an "
            "InputContext and read only its own process's share.",
            ", ".join(differ),
            peers.name,
        )
