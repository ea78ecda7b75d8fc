"""What a job trains: variables, step and loop, made in the strategy's scope."""

from __future__ import annotations

import hashlib
import itertools
import logging
import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.private import Saveable, reset_object_names
from tfdist.checkpoint import checkpoints
from tfdist.cluster import tpu
from tfdist.cluster.peers import Peers
from tfdist.cluster.peers import names as task_names
from tfdist.cluster.strategies import SYNCHRONOUS
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


class Builder:
    """Makes what is trained, again after each failure.

    Args:
        model_fn: As of an `Estimator`.
        config: Which strategy, and how.
    """

    def __init__(
        self, model_fn: Callable[[], keras.Model], config: RunConfig
    ) -> None:
        self._model_fn = model_fn
        self._config = config

    def build(
        self, strategy: tf.distribute.Strategy, input_fn: InputFn
    ) -> Trainable:
        """Everything that training needs, made in the strategy's scope."""
        context = self._input_context(strategy)
        peers, own = None, takes_context(input_fn)
        if self._config.strategy_name == "multi_worker_mirrored":
            peers = Peers(self._config.cluster)
            self._seed_alike(peers, context if own else None)
        dataset = with_context(input_fn)(context)
        if peers:
            self._check_same_program(peers, strategy, dataset)
            if not own:
                _warn_of_other_batches(peers, dataset)
        global_step, model = self.create_variables(strategy)
        replicas = None
        if isinstance(strategy, SYNCHRONOUS):
            replicas = Replicas(strategy, global_step)
        with named(input_fn):
            step = self._step(
                model, dataset.element_spec, global_step, replicas
            )
        variables = checkpoints.named_variables(model, global_step)
        if isinstance(step, KerasStep):
            variables = step.variables(variables)
        elif isinstance(strategy, tf.distribute.TPUStrategy):
            tpu.check(dataset.element_spec, step.tables)
        _log_placement(variables)
        loop = self._loop(
            strategy, step, global_step, dataset, input_fn, replicas
        )
        return Trainable(loop, global_step, variables, model=model)

    def _input_context(
        self, strategy: tf.distribute.Strategy
    ) -> tf.distribute.InputContext:
        """Which part of the data this process reads, where it trains itself."""
        cluster, several = self._config.cluster, {}
        if self._config.strategy_name == "multi_worker_mirrored":
            tasks = task_names(cluster)
            own = f"{cluster.task_type}:{cluster.task_index}"
            several = {
                "num_input_pipelines": len(tasks),
                "input_pipeline_id": tasks.index(own),
            }
        return tf.distribute.InputContext(
            num_replicas_in_sync=strategy.num_replicas_in_sync, **several
        )

    def _seed_alike(
        self, peers: Peers, own: tf.distribute.InputContext | None
    ) -> None:
        """Gives every process of an all-reduce job the same random numbers.

        They read the same global batches only if they shuffle them alike.

        Args:
            peers: The processes.
            own: Where each reads batches of its own: then they differ.
        """
        seed = self._config.tf_random_seed
        if seed is None:
            seed = random.SystemRandom().randrange(1 << 30)
        seed = int(peers.broadcast_from_leader("seed", str(seed), lambda: None))
        keras.utils.set_random_seed(seed)
        if own:
            tf.random.set_seed(seed + own.input_pipeline_id)

    def _check_same_program(
        self,
        peers: Peers,
        strategy: tf.distribute.Strategy,
        dataset: tf.data.Dataset,
    ) -> None:
        """Raises if another process of an all-reduce job does other things."""
        program = {
            "number of replicas": str(len(strategy.extended.worker_devices)),
            "batch": str(dataset.element_spec),
            "steps_per_dispatch": str(self._config.steps_per_dispatch),
        }
        for spec in describe(self._model_fn):
            program[f"variable {spec.name}"] = f"{spec.dtype} {spec.shape}"
        peers.check_same_program(program, lambda: None)

    def create_variables(
        self, strategy: tf.distribute.Strategy
    ) -> tuple[tf.Variable, keras.Model]:
        """The step counter, on the first server as in TF1, and the model."""
        num_ps = self._config.cluster.num_ps
        placement = self._config.placement
        specs: Sequence[VariableSpec] = ()
        if num_ps and placement != "round_robin":
            specs = describe(self._model_fn)
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
            model = checked_model(self._model_fn())
            _check_made_here(strategy, model)
            optimizers.build(model.optimizer, model.trainable_variables)
        return global_step, model

    def _step(
        self,
        model: keras.Model,
        element_spec: Any,
        global_step: tf.Variable,
        replicas: Replicas | None,
    ) -> ModelStep | KerasStep:
        """A step of a model, by its own `train_step` where that can be."""
        remote = self._config.strategy_name == "ps"
        if overrides(model, "train_step") and not (remote or replicas):
            return KerasStep(model, element_spec, global_step=global_step)
        return ModelStep(
            model,
            element_spec,
            global_step=global_step,
            remote=remote,
            replicas=replicas,
        )

    def _loop(
        self,
        strategy: tf.distribute.Strategy,
        step: ModelStep | KerasStep,
        global_step: tf.Variable,
        dataset: tf.data.Dataset,
        input_fn: InputFn,
        replicas: Replicas | None,
    ) -> Loop:
        remote = self._config.strategy_name == "ps"
        if isinstance(step, KerasStep) or not (remote or replicas):
            return LocalLoop(
                step, global_step, dataset, self._config.steps_per_dispatch
            )
        if replicas:
            return ReplicatedLoop(
                step,
                global_step,
                dataset,
                strategy=strategy,
                replicas=replicas,
                own_batches=takes_context(input_fn),
                steps_per_dispatch=self._config.steps_per_dispatch,
            )
        return CoordinatedLoop(
            step,
            global_step,
            with_context(input_fn),
            strategy=strategy,
            num_workers=self._config.cluster.num_workers,
            steps_per_dispatch=self._config.steps_per_dispatch,
            example=dataset,
        )


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


def _check_made_here(
    strategy: tf.distribute.Strategy, model: keras.Model
) -> None:
    """Raises `ValueError` for a model that another call has made."""
    for variable in model.variables:
        if not strategy.extended.variable_created_in_scope(variable.value):
            raise ValueError(
                f"The model function has returned model {model.name!r} with "
                f"variable {variable.path!r}, which it did not make: the "
                "variables of a model that was made elsewhere are not where "
                "the strategy needs them. Make the model, and all of its "
                "layers, inside the model function."
            )
