"""Canaries: what tfdist takes from Keras behind its public API still works."""

import inspect
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from tfdist._tf import private


def small_model(optimizer="adam"):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(optimizer=optimizer, loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_seed_state_name():
    generator = keras.random.SeedGenerator(7)
    assert generator.state.path.endswith(private.SEED_STATE_NAME)


def test_dropout_holds_a_seed_state():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dropout(0.5)])
    (state,) = model.non_trainable_variables
    assert state.path.endswith(private.SEED_STATE_NAME)


def test_reset_object_names_repeats_paths():
    def paths():
        private.reset_object_names()
        model = small_model()
        return [v.path for v in [*model.variables, *model.optimizer.variables]]

    assert paths() == paths()


def test_reset_object_names_keeps_the_dtype_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        private.reset_object_names()
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize(
    ("optimizer", "num_slots"),
    [
        (keras.optimizers.SGD(), 0),
        (keras.optimizers.SGD(momentum=0.9), 1),
        (keras.optimizers.Adagrad(), 1),
        (keras.optimizers.Adam(), 2),
        (keras.optimizers.Adam(amsgrad=True), 3),
        (keras.optimizers.Ftrl(), 2),
        (keras.optimizers.RMSprop(momentum=0.9, centered=True), 3),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_slot_lists(optimizer, num_slots):
    model = small_model(optimizer)
    lists = private.slot_lists(optimizer)
    assert len(lists) == num_slots
    for i, variable in enumerate(model.trainable_variables):
        assert private.variable_index(optimizer, variable) == i
        for slots in lists.values():
            assert slots[i].shape == variable.shape


def test_moving_averages():
    optimizer = keras.optimizers.SGD(use_ema=True)
    model = small_model(optimizer)
    averages = private.moving_averages(optimizer)
    shapes = [v.shape for v in model.trainable_variables]
    assert [v.shape for v in averages] == shapes


def test_uses_weight_decay():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel, bias = small_model(optimizer).trainable_variables
    assert private.uses_weight_decay(optimizer, kernel)
    assert not private.uses_weight_decay(optimizer, bias)


def test_unique_id_tells_variables_apart():
    one, two = tf.Variable(1.0), tf.Variable(1.0)
    assert private.unique_id(one) != private.unique_id(two)


def test_nadam_product():
    optimizer = keras.optimizers.Nadam()
    small_model(optimizer)
    assert float(private.nadam_product(optimizer).value) == 1.0


def test_coordinator():
    """What `schedule` and its kin use of a coordinator; clusters use it too."""
    module = private.cluster_coordinator
    queue = module._CoordinatedClosureQueue
    assert "timeout" in inspect.signature(queue.wait).parameters
    assert list(inspect.signature(module.Cluster.schedule).parameters) == [
        *("self", "function", "args", "kwargs")
    ]
    raises = inspect.getsource(queue._raise_if_error)
    assert "self._cancel_all_closures()" in raises
    assert callable(module.Cluster.stop)
    stop = inspect.getsource(module.WorkerPreemptionHandler.stop)
    assert "self._should_preemption_thread_run = False" in stop
    assert "with self._cluster_update_lock" in stop
    assert "self._cluster_due_for_update_or_finish.set()" in stop
    assert "failure_handler.stop()" in inspect.getsource(module.Cluster.stop)
    recovers = inspect.getsource(module.Worker._on_worker_recovery)
    assert "self._schedule_resource(resource._closure)" in recovers
    context = private.coordinator_context
    worker = SimpleNamespace(worker_index=3)
    with context.with_dispatch_context(worker):
        assert context.get_current_dispatch_context().worker_index == 3
    assert callable(module._select_worker_slice)
    assert callable(module._maybe_as_type_spec)
    for error in private.COORDINATOR_ERRORS:
        cause = ValueError("cause")
        assert error(cause).original_exception is cause


@pytest.mark.parametrize("name", ["set_server_def", "update_server_def"])
def test_expire_remote_state_after(name, monkeypatch):
    method = getattr(private.context.Context, name)
    (parameter,) = [
        p
        for p in inspect.signature(method).parameters.values()
        if p.default is not p.empty
    ]
    assert parameter.name == "keep_alive_secs"
    monkeypatch.setattr(method, "__defaults__", method.__defaults__)
    before = private.context._KEEP_ALIVE_SECS
    monkeypatch.setattr(private.context, "_KEEP_ALIVE_SECS", before)
    private.expire_remote_state_after(7)
    assert method.__defaults__ == (7,)
    assert private.context._KEEP_ALIVE_SECS == 7


def test_accumulators_and_counter():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model = small_model(optimizer)
    sums = private.accumulators(optimizer)
    assert [s.shape for s in sums] == [
        v.shape for v in model.trainable_variables
    ]
    gradients = [tf.ones(s.shape) for s in sums]
    optimizer.apply(gradients)
    assert int(private.counter(optimizer).numpy()) == 1
    assert int(optimizer.iterations) == 0
    assert float(keras.ops.sum(sums[0])) == 6.0


def test_counter_of_a_scaled_optimizer():
    inner = keras.optimizers.SGD()
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    assert private.counter(scaled) is private.counter(inner)
    assert private.counter(inner) is inner.iterations


def test_what_all_reduce_needs_of_the_context():
    """`test_all_reduce.py` runs them; this names what has changed."""
    context = private.context.Context
    for method, arguments in {
        "configure_coordination_service": {
            "service_type",
            "service_leader",
            "shutdown_barrier_timeout_in_ms",
            "coordinated_jobs",
        },
        "set_config_key_value": {"key", "value"},
        "get_config_key_value": {"key", "timeout_in_ms"},
    }.items():
        parameters = inspect.signature(getattr(context, method)).parameters
        assert arguments <= parameters.keys()
    job = private.coordination_config_pb2.CoordinatedJob(name="a", num_tasks=2)
    assert (job.name, job.num_tasks) == ("a", 2)


def test_masks():
    ids = tf.constant([[1, 0]])
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(ids)
    assert private.mask_of(embedded).numpy().tolist() == [[True, False]]
    other = tf.zeros([1, 2, 2])
    assert private.mask_of(other) is None
    private.set_mask(other, tf.constant([[False, True]]))
    # A layer finds it there: the first of the two steps is left out.
    values = tf.constant([[[8.0], [2.0]]])
    private.set_mask(values, private.mask_of(other))
    pooled = keras.layers.GlobalAveragePooling1D()(values)
    assert pooled.numpy().tolist() == [[2.0]]
