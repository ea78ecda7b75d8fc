"""What a job trains: variables, step and loop, made in the strategy's scope."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import keras
import tensorflow as tf

from tfdist._tf.private import Saveable, reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.cluster.peers import Peers
from tfdist.cluster.strategies import SYNCHRONOUS, check_tpu
from tfdist.data.input_fns import InputFn, named, takes_context, with_context
from tfdist.estimator.specs import RunConfig
from tfdist.placement.scope import placed_scope, placement_by_name
from tfdist.placement.variables import VariableSpec, describe
from tfdist.session.recoverable import Trainable
from tfdist.training import optimizers
from tfdist.training.compiled_model import checked_model, overrides
from tfdist.training.coordinated_loop import CoordinatedLoop
from tfdist.training.keras_step import KerasStep
from tfdist.training.loop import LocalLoop, Loop
from tfdist.training.replicas import Replicas
from tfdist.training.replicated_loop import ReplicatedLoop
from tfdist.training.step import ModelStep

_log = logging.getLogger(__name__)

ModelFn = Callable[[], keras.Model]


def build(
    model_fn: ModelFn,
    config: RunConfig,
    strategy: tf.distribute.Strategy,
    input_fn: InputFn,
) -> Trainable:
    """Everything that training needs, made in the strategy's scope."""
    if config.strategy_name == "multi_worker_mirrored":
        dataset = _same_as_others(model_fn, config, strategy, input_fn)
    else:
        context = tf.distribute.InputContext(
            num_replicas_in_sync=strategy.num_replicas_in_sync
        )
        dataset = with_context(input_fn)(context)
    global_step, model = create_variables(model_fn, config, strategy)
    with named(input_fn):
        step, loop = _step_and_loop(
            config, strategy, model, global_step, dataset, input_fn
        )
    variables = checkpoints.named_variables(model, global_step)
    if isinstance(step, KerasStep):
        variables = step.variables(variables)
    elif isinstance(strategy, tf.distribute.TPUStrategy):
        check_tpu(dataset.element_spec, step.tables)
    _log_placement(variables)
    return Trainable(loop, global_step, variables, model=model)


def create_variables(
    model_fn: ModelFn, config: RunConfig, strategy: tf.distribute.Strategy
) -> tuple[tf.Variable, keras.Model]:
    """The step counter, on the first server as in TF1, and the model."""
    num_ps, placement = config.cluster.num_ps, config.placement
    specs: Sequence[VariableSpec] = ()
    if num_ps and placement != "round_robin":
        specs = describe(model_fn)
    if isinstance(placement, str):
        placement = placement_by_name(placement, specs, num_ps or 1)
    with placed_scope(strategy, num_ps=num_ps):
        global_step = tf.Variable(
            0,
            dtype=tf.int64,
            trainable=False,
            name="global_step",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )
    reset_object_names()
    with placed_scope(
        strategy, num_ps=num_ps, placement=placement, specs=specs
    ):
        model = checked_model(model_fn())
        for variable in model.variables:
            if not strategy.extended.variable_created_in_scope(variable.value):
                raise ValueError(
                    f"The model function has returned model {model.name!r} "
                    f"with variable {variable.path!r}, which it did not make: "
                    "the variables of a model that was made elsewhere are not "
                    "where the strategy needs them. Make the model, and all of "
                    "its layers, inside the model function."
                )
        optimizers.build(model.optimizer, model.trainable_variables)
    return global_step, model


def _step_and_loop(
    config: RunConfig,
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    global_step: tf.Variable,
    dataset: tf.data.Dataset,
    input_fn: InputFn,
) -> tuple[ModelStep | KerasStep, Loop]:
    """A step of a model, by its own `train_step` where that can be."""
    spec, per_dispatch = dataset.element_spec, config.steps_per_dispatch
    if config.strategy_name == "ps":
        step = ModelStep(model, spec, global_step=global_step, remote=True)
        return step, CoordinatedLoop(
            step,
            global_step,
            with_context(input_fn),
            strategy=strategy,
            num_workers=config.cluster.num_workers,
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
            own_batches=takes_context(input_fn),
            steps_per_dispatch=per_dispatch,
        )
    kind = KerasStep if overrides(model, "train_step") else ModelStep
    local = kind(model, spec, global_step=global_step)
    return local, LocalLoop(local, global_step, dataset, per_dispatch)


def _same_as_others(
    model_fn: ModelFn,
    config: RunConfig,
    strategy: tf.distribute.Strategy,
    input_fn: InputFn,
) -> tf.data.Dataset:
    """The dataset of one process of an all-reduce job.

    They read the same global batches only if they shuffle them alike; if
    `input_fn` takes a context, each reads batches of its own.

    Raises:
        ValueError: the processes do not run the same program.
    """
    peers, tasks = Peers(config.cluster), list(config.cluster.addresses())
    index, own = tasks.index(peers.name), takes_context(input_fn)
    seed = config.tf_random_seed
    if seed is None:
        seed = random.SystemRandom().randrange(1 << 30)
    seed = int(peers.broadcast_from_leader("seed", str(seed), lambda: None))
    keras.utils.set_random_seed(seed)
    if own:
        tf.random.set_seed(seed + index)
    dataset = with_context(input_fn)(
        tf.distribute.InputContext(
            len(tasks), index, strategy.num_replicas_in_sync
        )
    )
    program = {
        "number of replicas": str(len(strategy.extended.worker_devices)),
        "batch": str(dataset.element_spec),
        "steps_per_dispatch": str(config.steps_per_dispatch),
    }
    for spec in describe(model_fn):
        program[f"variable {spec.name}"] = f"{spec.dtype} {spec.shape}"
    peers.check_same_program(program, lambda: None)
    if not own:
        _warn_of_other_batches(peers, dataset)
    return dataset


def _log_placement(variables: Mapping[str, Saveable]) -> None:
    """Says which task holds how many variables, each shard counted."""
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


def _warn_of_other_batches(peers: Peers, dataset: tf.data.Dataset) -> None:
    """Warns if the processes do not begin with the same global batch."""
    digest = hashlib.sha256()
    for batch in dataset.take(1):
        for part in tf.nest.flatten(batch, expand_composites=True):
            digest.update(part.numpy().tobytes())
    peers.announce("batch", digest.hexdigest())
    if not peers.leads:
        return
    others = peers.wait_for_others("batch", lambda: None)
    differ = [n for n, d in others.items() if d != digest.hexdigest()]
    if differ:
        _log.warning(
            "The first global batch of %s is another than that of %s. Each "
            "process takes its share of every batch, so examples are repeated "
            "and left out. Have the input function read the same everywhere "
            "(no sharding in it, seeds for what shuffles outside TensorFlow), "
            "or give it an argument: then it gets the InputContext and reads "
            "what belongs to its process.",
            ", ".join(differ),
            peers.name,
        )
