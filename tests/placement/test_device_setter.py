"""`replica_device_setter`, against `tf.compat.v1.train`."""

import subprocess
import sys

import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.placement.device_setter import device_scope, replica_device_setter
from tfdist.placement.strategies import (
    GreedyLoadBalancingStrategy,
    RandomStrategy,
    byte_size_load_fn,
)

v1 = tf.compat.v1
DEFAULT = "/job:localhost/replica:0/task:0/device:CPU:0"


def build(program, variables):
    """Runs a program: a tree of devices, variables and ops."""
    for kind, *rest in program:
        if kind == "device":
            with tf.device(rest[0]):
                build(rest[1], variables)
        elif kind == "op":
            tf.no_op()
        else:
            variables.append(rest[0]())


def programs(leaves, devices):
    return st.recursive(
        st.lists(leaves, min_size=1, max_size=4),
        lambda inner: st.lists(
            leaves | st.tuples(st.just("device"), devices, inner),
            min_size=1,
            max_size=4,
        ),
        max_leaves=12,
    )


def ref_variable():
    return v1.Variable([0.0, 1.0], use_resource=False, name="ref")


def resource_variable():
    return v1.Variable([0.0], use_resource=True, name="resource")


graph_leaves = st.sampled_from(
    [("op",), ("variable", ref_variable), ("variable", resource_variable)]
)
any_device = st.sampled_from(
    [
        "/job:ps",
        "/job:ps/task:0",
        "/job:ps/task:1",
        "/job:ps/task:5",
        "/job:worker",
        "/job:worker/task:1",
        "/job:moon",
        "/task:1",
        "/cpu:0",
        "/gpu:0",
        "/replica:0",
        "",
        None,
    ]
)
STRATEGIES = {
    "default": lambda n: None,
    "random": lambda n: RandomStrategy(n),
    "last": lambda n: lambda op: n - 1,
}


@st.composite
def setter_arguments(draw):
    num_ps = draw(st.integers(0, 3))
    arguments = {
        "ps_device": draw(
            st.sampled_from(["/job:ps", "/job:ps/task:1", "/cpu:0", ""])
        ),
        "worker_device": draw(
            st.sampled_from(["/job:worker", "/job:worker/task:1/gpu:0", ""])
        ),
        "merge_devices": draw(st.booleans()),
        "ps_ops": draw(
            st.sampled_from([None, [], ["VarHandleOp"], ["VariableV2", "NoOp"]])
        ),
    }
    cluster = {"worker": ["w:1"]}
    if num_ps or draw(st.booleans()):
        cluster["ps"] = [f"p{i}:1" for i in range(num_ps)]
    form = draw(st.sampled_from(["count", "dict", "spec", "def"]))
    if form == "count":
        arguments["ps_tasks"] = num_ps
    else:
        as_form = {
            "dict": lambda c: c,
            "spec": tf.train.ClusterSpec,
            "def": lambda c: tf.train.ClusterSpec(c).as_cluster_def(),
        }[form]
        arguments["cluster"] = as_form(cluster)
    strategy = STRATEGIES[draw(st.sampled_from(sorted(STRATEGIES)))]
    return arguments, lambda: strategy(max(num_ps, 1))


def graph_devices(setter, program):
    with tf.Graph().as_default() as graph, v1.device(setter):
        build(program, [])
    return [(op.name, op.device) for op in graph.get_operations()]


@given(arguments=setter_arguments(), program=programs(graph_leaves, any_device))
@settings(max_examples=200, deadline=None)
def test_no_difference_from_tf1_in_a_graph(arguments, program):
    arguments, make_strategy = arguments
    ours = replica_device_setter(**arguments, ps_strategy=make_strategy())
    theirs = v1.train.replica_device_setter(
        **arguments, ps_strategy=make_strategy()
    )
    assert (ours is None) == (theirs is None)
    assert graph_devices(ours, program) == graph_devices(theirs, program)


@pytest.mark.parametrize(
    ("inner", "device", "next_task"),
    [
        ("/job:ps/task:1", "/job:ps/task:1", 0),
        ("/job:ps/task:5", "/job:ps/task:5", 0),
        ("/job:ps", "/job:ps/task:1", 0),
        ("/job:worker/task:1", "/job:worker/task:1", 1),
        ("/job:moon", "/job:moon", 1),
        ("/gpu:0", "/job:ps/task:1/device:GPU:0", 0),
    ],
)
def test_the_table_of_explicit_devices(inner, device, next_task):
    with tf.Graph().as_default(), v1.device(replica_device_setter(ps_tasks=2)):
        first = ref_variable()
        with tf.device(inner):
            second = ref_variable()
        third = ref_variable()
    assert [first.device, second.device, third.device] == [
        "/job:ps/task:0",
        device,
        f"/job:ps/task:{next_task}",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ps_tasks": 0},
        {"cluster": {"worker": ["w:1"]}},
        {"cluster": {"ps": []}, "ps_tasks": 3},
        {"cluster": {"ps": []}, "ps_strategy": "not callable"},
    ],
)
def test_no_setter_without_parameter_servers(arguments):
    assert replica_device_setter(**arguments) is None
    with device_scope(replica_device_setter(**arguments)):
        assert tf.Variable(1.0).device == tf.Variable(1.0).device


def test_device_scope_takes_a_string():
    with device_scope("/cpu:0"):
        assert tf.constant(1.0).device.endswith("CPU:0")


# ---------------------------------------------------------------- TF2 scopes


def scope_devices(setter, program, *, in_function):
    """Returns the devices on which a scope has variables created."""
    seen = []

    def record(next_creator, **kwargs):
        seen.append(tf.__internal__.eager_context.get_device_name())
        with tf.device(None):
            return next_creator(**kwargs)

    with tf.variable_creator_scope(record):
        if in_function:
            with tf.__internal__.FuncGraph("f").as_default(), setter:
                build(program, [])
        else:
            with setter:
                build(program, [])
    return [full(device) for device in seen]


def full(device):
    default = tf.DeviceSpec.from_string(DEFAULT)
    given_fields = tf.DeviceSpec.from_string(device or "")
    return default.make_merged_spec(given_fields).to_string()


VARIABLE = ("variable", lambda: tf.Variable(lambda: tf.zeros([])))
UNDONE = ("device", None, [VARIABLE])
# Eagerly, TF2 tells only the sum of all blocks. It cannot tell others from the
# worker's own device, nor what was asked for inside `tf.device(None)`.
telling_device = st.sampled_from(
    ["/job:ps/task:1", "/job:ps/task:5", "/job:moon/task:2", "/gpu:0"]
)
scope_programs = {
    False: programs(st.sampled_from([VARIABLE, UNDONE]), telling_device),
    True: programs(st.just(VARIABLE), any_device),
}


@pytest.mark.parametrize("in_function", [False, True])
@pytest.mark.parametrize("merge_devices", [True, False])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_scopes_place_variables_as_tf1(in_function, merge_devices, data):
    program = data.draw(scope_programs[in_function])
    arguments = {
        "ps_tasks": data.draw(st.integers(1, 3)),
        "worker_device": "/job:worker/task:0",
        "merge_devices": merge_devices,
        "ps_ops": data.draw(st.sampled_from([None, [], ["VarHandleOp"]])),
    }
    with tf.Graph().as_default():
        variables = []
        with v1.device(v1.train.replica_device_setter(**arguments)):
            build(program, variables)
        expected = [full(v.device) for v in variables]
    setter = replica_device_setter(**arguments)
    assert scope_devices(setter, program, in_function=in_function) == expected


def test_scopes_tell_the_strategy_names_and_bytes():
    strategy = GreedyLoadBalancingStrategy(2, byte_size_load_fn)
    program = [
        ("variable", lambda n=n: tf.Variable(lambda: tf.zeros([n])))
        for n in (4, 2, 4, 3)
    ]
    setter = replica_device_setter(2, ps_strategy=strategy)
    devices = scope_devices(setter, program, in_function=False)
    tasks = [tf.DeviceSpec.from_string(device).task for device in devices]
    assert tasks == [0, 1, 1, 0]
    assert strategy.loads == (28, 24)


def test_a_scope_can_be_entered_again_and_nested():
    setter = replica_device_setter(2)
    program = [VARIABLE]
    first, second = (
        scope_devices(setter, program, in_function=False) for _ in range(2)
    )
    assert first == [full("/job:ps/task:0")]
    assert second == [full("/job:ps/task:1")]
    with setter:
        inner = scope_devices(setter, program, in_function=False)
    assert inner == [full("/job:ps/task:0")]


REAL = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(
    cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
from tfdist.placement.device_setter import replica_device_setter
made = {}

@tf.function(autograph=False)
def function(x):
    if not made:
        made["plain"] = tf.Variable(2.0)
        with tf.device("/cpu:3"):
            made["inner"] = tf.Variable(lambda: 3.0)
    return x * made["plain"] + made["inner"]

with replica_device_setter(
    1, ps_device="/job:localhost/cpu:1", worker_device="/job:localhost/cpu:2"
):
    v = tf.Variable([1.0])
    y = v + 1.0
    z = function(y)
print([int(x.device[-1]) for x in (v, y, z, *made.values())], float(z[0]))
"""


@pytest.mark.slow
def test_values_and_updates_on_real_devices():
    """Four CPU devices of one process, told before TensorFlow starts."""
    ran = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "[1, 2, 2, 1, 3] 7.0"


# --------------------------------------------------------------------- errors


def test_a_task_that_does_not_exist():
    setter = replica_device_setter(2, ps_strategy=lambda op: 9)
    with (
        tf.Graph().as_default(),
        v1.device(setter),
        pytest.raises(ValueError, match=r"from 0 to 1.*Received: 9"),
    ):
        ref_variable()


def test_sparse_tasks_are_the_ones_there_are():
    cluster = {"ps": {3: "a:1", 5: "b:1"}}
    setter = replica_device_setter(cluster=cluster)
    with tf.Graph().as_default(), v1.device(setter):
        devices = [ref_variable().device for _ in range(3)]
    assert devices == ["/job:ps/task:3", "/job:ps/task:5", "/job:ps/task:3"]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"ps_tasks": 2, "ps_strategy": 3}, TypeError, "must be callable"),
        ({"cluster": ["ps:1"]}, TypeError, "`cluster` must be a dict"),
        ({"ps_tasks": -1}, ValueError, "`ps_tasks` must be a positive integer"),
    ],
)
def test_bad_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        replica_device_setter(**arguments)
