"""Canaries: what tfdist takes from Keras behind its public API still works."""

import collections
import concurrent.futures
import contextlib
import functools
import inspect
import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfdist._tf import (
    private,
    private_checkpoints,
    private_keras,
    private_positions,
    private_renewal,
    private_workers,
)
from tfdist._tf.waiting import wait_for
from tfdist.placement.partitioners import row_runs


def small_model(optimizer="adam"):
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.compile(optimizer=optimizer, loss="mse")
    model.optimizer.build(model.trainable_variables)
    return model


def test_seed_state_name():
    generator = keras.random.SeedGenerator(7)
    assert generator.state.path.endswith(private_keras.SEED_STATE_NAME)


def test_dropout_holds_a_seed_state():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dropout(0.5)])
    (state,) = model.non_trainable_variables
    assert state.path.endswith(private_keras.SEED_STATE_NAME)


def test_a_checkpoint_by_batches_goes_on_at_a_step():
    def saves(callback, batches):
        return [callback._should_save_on_batch(batch) for batch in batches]

    whole, cut = (
        keras.callbacks.ModelCheckpoint("m.keras", save_freq=3)
        for _ in range(2)
    )
    wanted = saves(whole, [0, 1, 2, 3, 0, 1, 2, 3, 0])
    for step, batches in ((4, [0, 1, 2, 3, 0]), (5, [1, 2, 3, 0])):
        private_keras.resume_at(cut, step, 4)
        assert cut._current_epoch == 1
        assert saves(cut, batches) == wanted[step:]


def test_reset_object_names_repeats_paths():
    def paths():
        private_keras.reset_object_names()
        model = small_model()
        return [v.path for v in [*model.variables, *model.optimizer.variables]]

    assert paths() == paths()


def test_variables_of_one_path_are_told_apart():
    def tower(name):
        ids = keras.Input([], dtype="int32")
        rows = keras.layers.Embedding(5, 3, name="ids")(ids)
        rows = keras.layers.Dense(2, name=f"only_{name}")(shared(rows))
        return keras.Model(
            ids, keras.layers.Dropout(0.5, name="drop")(rows), name=name
        )

    shared = keras.layers.Dense(3, name="shared")
    inputs = [keras.Input([], dtype="int32") for _ in range(2)]
    towers = [tower("a"), tower("b")]
    outputs = [t(x) for t, x in zip(towers, inputs, strict=True)]
    model = keras.Model(inputs, keras.layers.Add()(outputs))
    paths = [v.path for v in model.variables]
    assert len({*paths}) < len(paths)
    private_keras.make_paths_unique(model)
    found = {v.path: v for v in model.variables}
    assert len(found) == len(paths)
    assert {"a/ids/embeddings", "b/ids/embeddings"} < found.keys()
    assert {"only_a/kernel", "only_b/kernel", "shared/kernel"} < found.keys()
    layer = towers[1].get_layer("ids")
    assert (layer.path, layer.embeddings) == (
        "b/ids",
        found["b/ids/embeddings"],
    )
    # Slots are called after them.
    optimizer = keras.optimizers.Adagrad()
    optimizer.build(model.trainable_variables)
    names = [v.path for v in optimizer.variables]
    assert "adagrad/b_ids_embeddings_accumulator" in names
    before = [v.path for v in model.variables]
    private_keras.make_paths_unique(model)
    assert [v.path for v in model.variables] == before


def test_a_clone_is_called_after_its_attribute():
    class Averaged(keras.Model):
        def __init__(self):
            super().__init__()
            layers = [keras.Input([4]), keras.layers.Dense(3, name="dense")]
            self.network = keras.Sequential(layers, name="sequential")
            self.target = keras.models.clone_model(self.network)

    model = Averaged()
    private_keras.make_paths_unique(model)
    assert [v.path for v in model.variables] == [
        "network/dense/kernel",
        "network/dense/bias",
        "target/dense/kernel",
        "target/dense/bias",
    ]


def test_a_layer_from_outside_of_the_name_of_one_inside():
    private_keras.reset_object_names()
    outside = keras.layers.Dense(1)

    def make():
        with private_keras.own_object_names():
            x = keras.Input([3])
            keras.Model(x, keras.layers.Dense(1)(outside(x)))

    with pytest.raises(ValueError, match="unique") as caught:
        make()
    assert "give that layer its own `name`" in caught.value.__notes__[0]


def test_what_sets_variables_assigns_them():
    model = small_model()
    kernel, rate = model.weights[0], model.optimizer.learning_rate
    for act, variable in (
        (lambda: model.set_weights(model.get_weights()), kernel),
        (lambda: setattr(model.optimizer, "learning_rate", 0.5), rate),
        (lambda: kernel.assign_add(kernel), kernel),
    ):
        with private_keras.assigned() as variables:
            act()
        assert any(v is variable for v in variables)
    kernel.assign(kernel)
    assert not any(v is kernel for v in variables[1:])


def test_models_have_a_default_signature_but_within():
    model = small_model()
    with private_keras.without_default_signatures():
        assert model._default_save_signature is None
    assert callable(model._default_save_signature)


def test_own_object_names_leave_those_outside_alone():
    private_keras.reset_object_names()
    names = [keras.layers.Dense(1).name]
    with private_keras.own_object_names():
        names += [keras.layers.Dense(1).name for _ in range(2)]
    names.append(keras.layers.Dense(1).name)
    assert names == ["dense", "dense", "dense_1", "dense_1"]


def test_reset_object_names_keeps_the_dtype_policy():
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        private_keras.reset_object_names()
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
        (keras.optimizers.SGD(use_ema=True, gradient_accumulation_steps=2), 2),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_slot_lists(optimizer, num_slots):
    model = small_model(optimizer)
    lists = private_keras.slot_lists(optimizer)
    assert len(lists) == num_slots
    for i, variable in enumerate(model.trainable_variables):
        assert private_keras.variable_index(optimizer, variable) == i
        for slots in lists.values():
            assert slots[i].shape == variable.shape


def test_uses_weight_decay():
    optimizer = keras.optimizers.AdamW()
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    kernel, bias = small_model(optimizer).trainable_variables
    assert private_keras.uses_weight_decay(optimizer, kernel)
    assert not private_keras.uses_weight_decay(optimizer, bias)


def test_leave_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])
    with strategy.scope():
        inner = small_model()
        outer = keras.Sequential([keras.Input([3]), inner])
    assert inner.distribute_strategy is strategy
    private_keras.leave_strategy(outer)
    for model in outer, inner:
        assert model.distribute_strategy is tf.distribute.get_strategy()


def test_methods_of_all_gradients():
    called = []

    def spied(name):
        def method(self, *args):
            called.append(name)
            return getattr(keras.optimizers.SGD, name)(self, *args)

        return method

    names = private_keras.METHODS_OF_ALL_GRADIENTS
    own = type("Own", (keras.optimizers.SGD,), {n: spied(n) for n in names})
    model = small_model(own(weight_decay=0.1, use_ema=True))
    model.optimizer.apply_gradients(
        [(tf.zeros(v.shape), v) for v in model.trainable_variables]
    )
    assert sorted(called) == sorted(names)


def test_the_spec_of_what_is_none():
    pair = tf.data.Dataset.from_tensors((1, None)).element_spec
    assert isinstance(pair[1], private.NoneTensorSpec)


def test_unique_id_tells_variables_apart():
    one, two = tf.Variable(1.0), tf.Variable(1.0)
    assert private.unique_id(one) != private.unique_id(two)


def test_nadam_product():
    optimizer = keras.optimizers.Nadam()
    small_model(optimizer)
    assert float(private_keras.nadam_product(optimizer).value) == 1.0


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


@pytest.mark.parametrize(
    ("kind", "task", "renewed"),
    [
        (tf.errors.UnavailableError, "worker", False),  # TensorFlow does it.
        (tf.errors.UnavailableError, "ps", True),
        (tf.errors.InvalidArgumentError, "worker", True),
        (tf.errors.CancelledError, "worker", True),
    ],
)
def test_iterators_are_made_again(kind, task, renewed):
    """Where TensorFlow takes the error for a passing one, or raises it."""
    made, module = [], private_workers.cluster_coordinator
    worker = SimpleNamespace(
        worker_index=0, _on_worker_recovery=lambda: made.append(0)
    )
    cluster = SimpleNamespace(workers=[worker])
    error = kind(None, None, f"From /job:{task}/replica:0/task:0: it failed.")
    with private.coordinator_context.with_dispatch_context(worker):
        private_workers.renew_resources(
            SimpleNamespace(_cluster=cluster), error
        )
    assert bool(made) == renewed
    handles = inspect.getsource(module.WorkerPreemptionHandler.wait_on_failure)
    assert 'isinstance(e, errors.CancelledError) and "/job:" in' in handles


def test_each_worker_has_the_lookup_tables_of_a_model():
    """Those of TensorFlow know the workers of the time they were made."""
    kind, asked = private_workers.ps_values.DistributedTable, []

    def coordinator(number):
        def create(function):
            asked.append(number)
            return SimpleNamespace(_values=tuple(range(number)))

        return SimpleNamespace(
            _cluster=SimpleNamespace(workers=[None] * number),
            _create_per_worker_resources=create,
        )

    table, first = kind.__new__(kind), coordinator(2)
    table._coordinator, table._distributed_table = first, None
    table._distributed_table_creation_lock = threading.Lock()
    table._maybe_build_distributed_table()
    private_workers.renew_tables(first)
    assert asked == [2]
    first._cluster.workers.append(None)
    private_workers.renew_tables(first)  # For three; `first` makes two.
    assert asked == [2, 2]
    private_workers.renew_tables(other := coordinator(4))
    assert table._coordinator is other
    assert len(table._distributed_table._values) == 4
    assert asked == [2, 2, 4]


def test_other_workers_for_a_coordinator(monkeypatch):
    """Their threads begin and end; `test_elastic.py` does it in clusters."""
    module = private_workers.cluster_coordinator
    lock = threading.Lock()
    strategy = SimpleNamespace(_num_workers=1, _num_ps=1)
    monkeypatch.setattr(
        module,
        "WorkerPreemptionHandler",
        lambda *_: SimpleNamespace(_cluster_update_lock=lock),
    )
    cluster = module.Cluster(strategy)
    coordinator = SimpleNamespace(_cluster=cluster)
    told = []
    context = private_workers.context
    job = context.get_server_def  # None: no cluster.
    assert job() is None
    server_def = tf.train.ServerDef()
    worker = server_def.cluster.job.add(name="worker")
    worker.tasks[0] = "a:1"
    monkeypatch.setattr(context, "get_server_def", lambda: server_def)
    monkeypatch.setattr(
        context,
        "context",
        lambda: SimpleNamespace(update_server_def=told.append),
    )

    def threads():
        prefix = "WorkerClosureProcessingLoop-"
        names = [thread.name for thread in threading.enumerate()]
        return {name for name in names if name.startswith(prefix)}

    for addresses in (["a:1", "b:1", "c:1"], ["a:1", "b:1"]):
        with private_workers.locked_workers(coordinator) as free:
            assert free
            with private_workers.locked_workers(coordinator) as twice:
                assert not twice
            workers = dict(enumerate(addresses))
            private_workers.connect_workers(coordinator, workers)
        assert dict(told[-1].cluster.job[0].tasks) == workers
        assert cluster.failure_handler._server_def is told[-1]
        names = [f"/job:worker/replica:0/task:{i}" for i in workers]
        assert [w.device_name for w in cluster.workers] == names
        number = len(names)
        assert wait_for(lambda n=number: len(threads()) == n, 10)
    cluster.failure_handler.stop = lambda: None
    cluster.stop()


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


def test_counter_of_accumulated_steps():
    optimizer = keras.optimizers.SGD(gradient_accumulation_steps=2)
    model = small_model(optimizer)
    (sums,) = private_keras.slot_lists(optimizer).values()
    optimizer.apply([tf.ones(v.shape) for v in model.trainable_variables])
    assert int(private_keras.counter(optimizer).numpy()) == 1
    assert int(optimizer.iterations) == 0
    assert float(keras.ops.sum(sums[0])) == 6.0


def test_counter_of_a_scaled_optimizer():
    inner = keras.optimizers.SGD()
    scaled = keras.optimizers.LossScaleOptimizer(inner)
    assert private_keras.counter(scaled) is private_keras.counter(inner)
    assert private_keras.counter(inner) is inner.iterations


@pytest.mark.skipif(
    not hasattr(keras.optimizers, "MultiOptimizer"), reason="Keras 3.12"
)
def test_part_index():
    """The second of the two optimizers is the one of all that are left."""
    parts = keras.optimizers.OptimizerMap(
        keras.optimizers.SGD(), {".*bias": keras.optimizers.Adam()}
    )
    optimizer = keras.optimizers.MultiOptimizer(parts)
    kernel, bias = small_model(optimizer).trainable_variables
    assert isinstance(optimizer.optimizers[0], keras.optimizers.Adam)
    assert private_keras.part_index(optimizer, kernel) == 1
    assert private_keras.part_index(optimizer, bias) == 0


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


def test_a_checkpoint_holds_a_table_whole(tmp_path):
    """And a tensor is made by the class itself, not from its shards."""
    shards = [tf.Variable([0.0, 3.0]), tf.Variable([1.0, 2.0])]
    runs = [[(0, 1), (3, 1)], [(1, 2)]]
    table = private_checkpoints.PartitionedVariable(shards, runs)
    assert tf.convert_to_tensor(table).numpy().tolist() == [0, 1, 2, 3]
    assert table[1:3].numpy().tolist() == [1, 2]
    path = tf.train.Checkpoint(table=table).write(str(tmp_path / "table"))
    saved = tf.train.load_variable(path, "table/.ATTRIBUTES/VARIABLE_VALUE")
    assert saved.tolist() == [0, 1, 2, 3]
    other = tf.Variable(tf.zeros([4]))
    tf.train.Checkpoint(table=other).read(path).assert_consumed()
    assert other.numpy().tolist() == [0, 1, 2, 3]
    for shard in shards:
        shard.assign([9.0, 9.0])
    tf.train.Checkpoint(table=table).read(path).assert_consumed()
    assert table.numpy().tolist() == [0, 1, 2, 3]
    table = private_checkpoints.ShardedVariable(shards)
    assert tf.convert_to_tensor(table).numpy().tolist() == [0, 3, 1, 2]


@pytest.mark.parametrize("width", [1, 8, 10, 16])
def test_the_long_runs_of_a_table_are_saved_without_a_copy(width):
    rows = np.random.default_rng(0).normal(size=(100_003, width))
    variable = tf.Variable(rows.astype("float32"))
    own = [run for run in row_runs(3 * 100_003, 3) if run.shard == 1]
    runs = private_checkpoints._aligned([(run.row, run.size) for run in own])
    sizes = [size for _, size in runs]
    pieces = private_checkpoints._pieces(variable, sizes)
    assert [len(piece) for piece in pieces] == sizes
    np.testing.assert_array_equal(np.concatenate(pieces), variable)
    whole = np.asarray(memoryview(variable.read_value_no_copy()))
    shared = [
        len(piece)
        for piece in pieces
        if np.shares_memory(whole, np.asarray(memoryview(piece)))
    ]
    assert sum(shared) > 99_800
    traced = tf.function(lambda: private_checkpoints._pieces(variable, sizes))
    ops = traced.get_concrete_function().graph.get_operations()
    assert len(ops) < 4 * len(sizes)  # The time that a job takes to start.


def test_a_small_table_is_cut_by_one_operation():
    variable = tf.Variable(tf.reshape(tf.range(800.0), [100, 8]))
    sizes = [1, 2, 61, 36]
    traced = tf.function(lambda: private_checkpoints._pieces(variable, sizes))
    ops = traced.get_concrete_function().graph.get_operations()
    types = collections.Counter(op.type for op in ops)
    assert (types["SplitV"], types["Reshape"]) == (1, 0)
    for pieces in (traced(), private_checkpoints._pieces(variable, sizes)):
        assert [len(piece) for piece in pieces] == sizes
        np.testing.assert_array_equal(np.concatenate(pieces), variable)


def test_a_checkpoint_holds_a_position_as_if_it_were_the_iterator(tmp_path):
    iterator = iter(tf.data.Dataset.range(5))
    assert next(iterator) == 0
    position = private_positions.HeldPosition(iterator)
    position.hold()
    assert next(iterator) == 1
    path = tf.train.Checkpoint(iterator=position).write(str(tmp_path / "held"))
    position.release()
    assert private_positions.restore_position(iterator, path)
    assert next(iterator) == 1
    tf.train.Checkpoint(iterator=iterator).restore(path).expect_partial()
    assert next(iterator) == 1
    nothing = tf.train.Checkpoint().write(str(tmp_path / "nothing"))
    assert not private_positions.restore_position(iterator, nothing)
    assert next(iterator) == 2


def test_an_iterator_of_another_dataset_begins_again(tmp_path):
    """TensorFlow would go on with what was buffered of the other one."""
    iterator = iter(tf.data.Dataset.range(5))
    assert next(iterator) == 0
    position = private_positions.HeldPosition(iterator)
    position.hold()
    path = tf.train.Checkpoint(iterator=position).write(str(tmp_path / "held"))
    other = iter(tf.data.Dataset.range(10, 13))
    with pytest.raises(private_positions.OtherDatasetError, match="differ"):
        private_positions.restore_position(other, path)
    assert [*map(int, other)] == [10, 11, 12]


def test_arrays_too_large_to_compare_are_restored(
    tmp_path, monkeypatch, caplog
):
    nothing = tf.compat.v1.GraphDef()  # As TensorFlow returns from 2 GB on.
    monkeypatch.setattr(private_positions, "graph_of", lambda _: nothing)
    iterator = iter(tf.data.Dataset.range(5))
    assert next(iterator) == 0
    position = private_positions.HeldPosition(iterator)
    position.hold()
    path = tf.train.Checkpoint(iterator=position).write(str(tmp_path / "held"))
    again = iter(tf.data.Dataset.range(5))
    assert private_positions.restore_position(again, path)
    assert next(again) == 1
    assert "too much to compare" in caplog.text


def test_what_a_restore_that_failed_leaves_begins_again(tmp_path):
    """Of checkpoints that do not say which dataset it was."""
    iterator = iter(tf.data.Dataset.range(5))
    path = tf.train.Checkpoint(iterator=iterator).write(str(tmp_path / "old"))
    dataset = tf.data.Dataset.range(5).map(lambda i: tf.gather([1, 2], i // 4))
    other = iter(dataset.skip(2))
    with pytest.raises(private_positions.OtherDatasetError, match="iterator"):
        private_positions.restore_position(other, path)
    assert [*map(int, other)] == [1, 1, 2]


def test_masks():
    ids = tf.constant([[1, 0]])
    embedded = keras.layers.Embedding(3, 2, mask_zero=True)(ids)
    assert private_keras.mask_of(embedded).numpy().tolist() == [[True, False]]
    other = tf.zeros([1, 2, 2])
    assert private_keras.mask_of(other) is None
    private_keras.set_mask(other, tf.constant([[False, True]]))
    # A layer finds it there: the first of the two steps is left out.
    values = tf.constant([[[8.0], [2.0]]])
    private_keras.set_mask(values, private_keras.mask_of(other))
    pooled = keras.layers.GlobalAveragePooling1D()(values)
    assert pooled.numpy().tolist() == [[2.0]]


def test_profiles():
    assert not private_keras.profiles(keras.callbacks.TensorBoard())
    callback = keras.callbacks.TensorBoard()
    callback._init_profile_batch((2, 3))
    assert private_keras.profiles(callback)


def test_local_state_kept(monkeypatch):
    """What `StaticHashTable` and `tf.Variable` have to be made again from."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a"], [7]), -1
    )
    variable = tf.Variable([1.0, 2.0])
    before = table.resource_handle, variable.handle
    with private.local_state_kept():
        pass
    assert (table.resource_handle, variable.handle) == before
    devices = [variable.handle.device, "/job:chief/replica:0/task:0"]
    monkeypatch.setattr(private, "_here", lambda: devices.pop(0))
    with private.local_state_kept():
        variable.assign([0.0, 0.0])  # As it were lost.
    assert table.resource_handle is not before[0]
    assert variable.handle is not before[1]
    assert table.lookup(tf.constant(["a", "b"])).numpy().tolist() == [7, -1]
    assert variable.numpy().tolist() == [1.0, 2.0]
    assert (variable + 1.0).numpy().tolist() == [2.0, 3.0]


@pytest.fixture
def on_servers(monkeypatch):
    """Variables that are taken for those on parameter servers."""
    variables = [tf.Variable([1.0, 2.0]), tf.Variable(3.0)]
    monkeypatch.setattr(private_renewal, "_on_servers", lambda: variables)
    return variables


def test_functions_outlive_the_memory_of_variables(on_servers):
    """Also one in which another is called, and one that was not called."""
    a, b = on_servers
    inner = tf.function(lambda: 2 * a)
    outer = tf.function(lambda: inner() + b)
    assert outer().numpy().tolist() == [5.0, 7.0]
    traced = inner.get_concrete_function()
    old = [v.handle for v in on_servers]

    def read(handle):
        return tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)

    private_renewal.renew()
    a.assign([5.0, 6.0])
    b.assign(1.0)
    assert outer().numpy().tolist() == [11.0, 13.0]
    assert traced().numpy().tolist() == [10.0, 12.0]
    new = [v.handle for v in on_servers]
    assert not {*map(id, new)} & {*map(id, old)}
    assert not tf.size(read(old[0]))  # Its memory is free.
    # What a step of before still writes is nothing to us.
    tf.raw_ops.AssignVariableOp(resource=old[0], value=tf.zeros([2]))
    assert outer().numpy().tolist() == [11.0, 13.0]


def test_variables_that_are_not_in_a_checkpoint_are_found(on_servers):
    a, b = on_servers
    assert private_renewal.is_known([a], [b])
    assert not private_renewal.is_known([a], [])
    table = private_checkpoints.PartitionedVariable([a], [[(0, 2)]])
    assert private_renewal.is_known([table, b], [])
    on_servers.append(private.UninitializedVariable(shape=[], dtype=tf.int32))
    assert private_renewal.is_known([table, b], [])


def test_there_is_no_time_where_ops_are_deterministic(monkeypatch):
    assert private.now() > 1.7e9
    monkeypatch.setattr(
        private.config, "is_op_determinism_enabled", lambda: True
    )
    assert private.now() == 0


def test_the_loss_tracker_is_that_of_compile():
    model = small_model()
    assert private_keras.loss_tracker(model) is model.metrics[0]


def test_copy_tables():
    """A function that was traced with a table looks up a copy of it."""
    table = tf.lookup.StaticHashTable(
        tf.lookup.KeyValueTensorInitializer(["a"], [7]), -1
    )

    @tf.function
    def look_up():
        data = tf.data.Dataset.from_tensors(tf.constant(["a", "b"]))
        return data.map(table.lookup).get_single_element()

    function = look_up.get_concrete_function()

    def handle():
        read = function.captured_inputs
        return next(t for t in read if t.dtype == tf.resource)

    assert handle() is table.resource_handle
    private.copy_tables(function)
    assert handle() is not table.resource_handle
    assert function().numpy().tolist() == [7, -1]


def test_late_captures():
    graph = tf.__internal__.FuncGraph("late")
    with graph.as_default():
        spec = tf.TensorSpec([], tf.int32)
        graph.capture_call_time_value(lambda: tf.constant(3), spec)
    (stand_in,), (told,) = private.late_captures(graph)
    assert stand_in.graph is graph
    assert [int(t) for t in tf.nest.flatten(told())] == [3]


def test_is_built():
    model = keras.Model()
    model.dense = keras.layers.Dense(1)
    model.dense.build([None, 2])
    model.built = True
    assert private_keras.is_built(model)
    tower = keras.Sequential([keras.layers.Dense(1)])
    model.towers = [tower]
    assert not private_keras.is_built(model)
    tower.build((None, 2))
    assert private_keras.is_built(model)


def test_variable_handles():
    class Scaled(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.scale = tf.Variable(2.0)

    layer, count = Scaled(), tf.Variable(0)
    pairs = tf.lookup.KeyValueTensorInitializer(["a"], [2.0])
    table = tf.lookup.StaticHashTable(pairs, 1.0)

    @tf.function
    def run():
        count.assign_add(1)
        return table.lookup(tf.constant(["a"])) * layer.scale

    graph = run.get_concrete_function().graph
    found = {id(handle) for handle in private.variable_handles(graph)}
    assert found == {id(count.handle), id(layer.scale.handle)}
    model = keras.Sequential([layer], name="model")
    told = private_keras.attribute(model, layer.scale.handle)
    assert told == "`scale` of layer 'scaled'"
    assert not private_keras.attribute(model, count.handle)


def test_shared_table():
    ids = [tf.feature_column.categorical_column_with_identity("a", 5)]
    with tf.Graph().as_default():
        [column] = tf.feature_column.shared_embeddings(ids, 2, trainable=False)
    table = private.shared_table(column)
    assert table.creator is column.shared_embedding_column_creator
    assert (table.name, table.dimension) == ("a_shared_embedding", 2)
    assert (table.trainable, table.ckpt_to_load_from) == (False, None)
    assert table.initializer.get_config()["stddev"] == pytest.approx(2**-0.5)


def test_config_of_a_column():
    column = tf.feature_column.numeric_column("a", shape=(2,))
    config = private.column_config(column)
    assert private.column_from_config(config) == column


def test_a_py_dataset_is_read_as_by_fit():
    class Batches(keras.utils.PyDataset):
        ended = 0

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return np.full([2, 1], index), np.zeros([2, 1])

        def on_epoch_end(self):
            self.ended += 1

    data = Batches(workers=2)
    read = [
        int(x[0, 0]) for x, _ in private_keras.py_dataset_batches(data, False)
    ]
    assert (read, data.ended) == ([0, 1, 2], 1)
    batches = private_keras.py_dataset_batches(data, False)
    for _ in range(3):  # Nor is the last epoch of a job asked for more.
        next(batches)
    assert data.ended == 2
    batches.close()
    assert data.ended == 2
    x, _ = private_keras.py_dataset_spec(data)
    assert x.shape.as_list() == [None, 1]


def test_a_tape_takes_a_tensor_for_a_variable():
    value = tf.constant(3.0)

    @tf.function
    def gradient():
        read = value * 1.0
        with tf.GradientTape() as tape:
            private.accessed(read)
            square = read * read
        return tape.gradient(square, read)

    assert float(gradient()) == 6.0


def test_a_tape_watches_what_a_function_with_its_own_gradient_reads():
    value = tf.constant(3.0)

    @tf.function
    def gradient():
        read = value * 1.0

        @tf.recompute_grad
        def product(x):
            return x * private.accessed(read)

        with tf.GradientTape() as tape:
            result = product(tf.constant(5.0))
        return tape.gradient(result, read)

    assert float(gradient()) == 5.0


def test_seen_alone_changes_what_keras_asks_for():
    strategy = tf.distribute.MirroredStrategy(["CPU:0"])

    def run():
        context = tf.distribute.get_replica_context()
        with private.single_replica_view():
            assert not tf.distribute.has_strategy()
            assert tf.distribute.get_replica_context() is context
        return tf.distribute.get_strategy() is strategy

    assert strategy.run(run)


def test_each_thread_has_its_own_losses():
    """A call begins while that of another thread goes on."""
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(2)])
    model.layers[0].activity_regularizer = keras.regularizers.L2(1.0)
    private_keras.keep_losses_per_thread(model)

    def losses(x, scope):
        with scope():
            model(x)
            if thread:
                other = thread.pop().submit(losses, 2 * x, scope)
                assert other.result() > 0
            assert len(model.losses) == 1
            return float(model.losses[0])

    collects = functools.partial(keras.StatelessScope, collect_losses=True)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for scope in (collects, contextlib.nullcontext):
            thread = [pool]
            assert losses(tf.ones([1, 3]), scope) > 0


def test_trained():
    model = small_model()
    found = private_keras.trained(model.optimizer)
    assert all(map(lambda a, b: a is b, found, model.trainable_variables))


def test_each_thread_has_its_seed_generator():
    keras.random.normal([])
    own = private_keras.seed_generator()

    def drawn_from(generator):
        private_keras.use_seed_generator(generator)
        keras.random.normal([])
        return private_keras.seed_generator()

    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        assert thread.submit(private_keras.seed_generator).result() is None
        assert thread.submit(drawn_from, own).result() is own
        assert thread.submit(drawn_from, None).result() is not own


@pytest.mark.parametrize("is_deferred", [False, True])
def test_a_variable_beside_another_is_made_where_that_is(is_deferred):
    """Also if Keras makes it later, where layers are built by their shapes."""
    others = []

    class Two(keras.layers.Layer):
        def build(self, shape):
            self.first = self.add_weight(shape=[3], name="first")
            self.second = private_keras.ColocatedZeros(
                self.first, (2, 4), "int64", "second"
            )
            self._track_variable(self.second)

        def call(self, x):
            return x

    def creator(next_creator, **kwargs):
        others.append(kwargs.get("colocate_with"))
        return next_creator(**kwargs)

    class Outer(keras.layers.Layer):
        """Keras builds it by calling it without a tensor at hand."""

        def __init__(self):
            super().__init__()
            self.two = Two(name="two")

        def call(self, x):
            return self.two(x)

    layer = Outer() if is_deferred else Two(name="two")
    strategy = tf.distribute.OneDeviceStrategy("cpu")
    with strategy.scope(), tf.variable_creator_scope(creator):
        layer(np.ones([1, 2]))
    two = layer.two if is_deferred else layer
    first, second = others
    assert first is None
    assert second is two.first.value
    assert two.second.dtype == "int64"
    assert two.second.path.endswith("two/second")
    assert not two.second.trainable
    np.testing.assert_array_equal(two.second.numpy(), np.zeros([2, 4]))
    assert two.non_trainable_variables == [two.second]
