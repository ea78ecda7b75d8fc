import contextlib
import copy
import json
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfdist.cluster.spec import Cluster

JOBS = {"chief": ["c:1"], "worker": ["w:1", "w:2"], "ps": ["p:1", "p:2"]}
DATA = {**JOBS, "dispatcher": ["d:1"], "data_worker": ["f:1", "f:2"]}


def config(cluster=None, task=None, **others):
    """JSON text of a TF_CONFIG; None leaves a key out."""
    parts = {"cluster": cluster, "task": task, **others}
    return json.dumps({k: v for k, v in parts.items() if v is not None})


def task(job, index=0):
    return {"type": job, "index": index}


def read(text):
    return Cluster.from_env({"TF_CONFIG": text})


# --- Good forms ------------------------------------------------------------

VERTEX_EXTRAS = {
    "environment": "cloud",
    "job": {"python_module": "trainer.task"},
}

# (id, TF_CONFIG, role, is_chief, address, has_evaluator)
GOOD_TF_CONFIGS = [
    ("blank", "  ", "local", True, None, False),
    ("empty object", "{}", "local", True, None, False),
    ("nulls", '{"cluster": null, "task": null}', "local", True, None, False),
    ("only extras", config(**VERTEX_EXTRAS), "local", True, None, False),
    ("no cluster", config(task=task("worker")), "local", True, None, False),
    (
        "vertex chief",
        config(JOBS, {**task("chief"), "trial": ""}, **VERTEX_EXTRAS),
        "chief",
        True,
        "c:1",
        False,
    ),
    (
        "vertex worker, index as a string",
        config(JOBS, {**task("worker", "1"), "cloud": "x"}),
        "worker",
        False,
        "w:2",
        False,
    ),
    ("ps", config(JOBS, task("ps", 1)), "ps", False, "p:2", False),
    (
        "vertex evaluator, outside the cluster",
        config(JOBS, task("evaluator")),
        "evaluator",
        False,
        None,
        True,
    ),
    (
        "kubeflow evaluator, inside the cluster",
        config({**JOBS, "evaluator": ["e:1"]}, task("evaluator")),
        "evaluator",
        False,
        "e:1",
        True,
    ),
    (
        "kubeflow chief beside an evaluator",
        config({**JOBS, "evaluator": ["e:1"]}, task("chief")),
        "chief",
        True,
        "c:1",
        True,
    ),
    (
        "evaluator without cluster",
        config(task=task("evaluator")),
        "evaluator",
        False,
        None,
        True,
    ),
    (
        "one chief and an evaluator",
        config({"chief": ["c:1"], "evaluator": ["e:1"]}, task("chief")),
        "local",
        True,
        "c:1",
        True,
    ),
    (
        "master",
        config({"master": ["c:1"], "worker": ["w:1"]}, task("master")),
        "chief",
        True,
        "c:1",
        False,
    ),
    (
        "worker beside a master",
        config({"master": ["c:1"], "worker": ["w:1"]}, task("worker")),
        "worker",
        False,
        "w:1",
        False,
    ),
    (
        "one node, no task",
        config({"chief": ["c:1"]}),
        "local",
        True,
        "c:1",
        False,
    ),
    (
        "one node, empty task",
        config({"worker": ["w:1"]}, {}),
        "local",
        True,
        "w:1",
        False,
    ),
    (
        "jobs without tasks",
        config({"chief": ["c:1"], "worker": [], "ps": {}}, {}),
        "local",
        True,
        "c:1",
        False,
    ),
    (
        "sparse workers",
        config(
            {"chief": ["c:1"], "worker": {"0": "w:1", "3": "w:4"}},
            task("worker", 3),
        ),
        "worker",
        False,
        "w:4",
        False,
    ),
    (
        "all-reduce, worker 0 leads",
        config({"worker": ["w:1", "w:2"]}, task("worker", 0)),
        "chief",
        True,
        "w:1",
        False,
    ),
    (
        "all-reduce, worker 1",
        config({"worker": ["w:1", "w:2"]}, task("worker", 1)),
        "worker",
        False,
        "w:2",
        False,
    ),
    (
        "ipv6",
        config({"chief": ["[::1]:1"], "worker": ["[::1]:2"]}, task("worker")),
        "worker",
        False,
        "[::1]:2",
        False,
    ),
]


@pytest.mark.parametrize(
    ("text", "role", "is_chief", "address", "has_evaluator"),
    [row[1:] for row in GOOD_TF_CONFIGS],
    ids=[row[0] for row in GOOD_TF_CONFIGS],
)
def test_good_tf_config(text, role, is_chief, address, has_evaluator):
    cluster = read(text)
    assert cluster.role == role
    assert cluster.is_chief == is_chief
    assert cluster.address == address
    assert cluster.has_evaluator == has_evaluator
    assert "evaluator" not in cluster.training_spec()


def test_counts_and_spec():
    cluster = read(config({**JOBS, "evaluator": ["e:1"]}, task("worker", 1)))
    assert (cluster.num_ps, cluster.num_workers) == (2, 2)
    assert cluster.is_distributed
    assert cluster.training_spec() == {
        "chief": {0: "c:1"},
        "worker": {0: "w:1", 1: "w:2"},
        "ps": {0: "p:1", 1: "p:2"},
    }


@pytest.mark.parametrize(
    ("own", "role", "address"),
    [
        (task("dispatcher"), "dispatcher", "d:1"),
        (task("data_worker", 1), "data_worker", "f:2"),
        (task("chief"), "chief", "c:1"),
    ],
)
def test_a_data_service_does_not_train(own, role, address):
    cluster = read(config(DATA, own))
    assert (cluster.role, cluster.address) == (role, address)
    assert cluster.is_chief == (role == "chief")
    assert (
        cluster.training_spec()
        == read(config(JOBS, task("chief"))).training_spec()
    )
    assert cluster.dispatcher == "d:1"
    assert cluster.data_workers == ("f:1", "f:2")
    assert cluster.shape == "chief, 2 workers, 2 ps, dispatcher, 2 data workers"


def test_a_data_service_beside_one_process():
    jobs = {"chief": ["c:1"], "dispatcher": ["d:1"], "data_worker": ["f:1"]}
    assert read(config(jobs, task("chief"))).role == "local"


def test_neither_variable_is_local():
    assert Cluster.from_env({}) == Cluster()
    assert str(Cluster()) == "one local process, no cluster"


def test_training_spec_is_what_tensorflow_takes():
    tf = pytest.importorskip("tensorflow")
    spec = read(
        config(
            {"chief": ["c:1"], "worker": {"0": "a:1", "3": "b:1"}},
            task("chief"),
        )
    ).training_spec()
    assert tf.train.ClusterSpec(spec).task_indices("worker") == [0, 3]


# --- CLUSTER_SPEC ----------------------------------------------------------

POOLS = {
    "workerpool0": ["c:1"],
    "workerpool1": ["w:1", "w:2"],
    "workerpool2": ["p:1"],
    "workerpool3": ["e:1"],
}


def pools(task_type, index=0, **cluster):
    return json.dumps(
        {
            "cluster": cluster or POOLS,
            "environment": "cloud",
            "task": {"type": task_type, "index": index, "trial": "T"},
            "job": '{"python_module": "trainer.task"}',
            "open_ports": [3333],
        }
    )


@pytest.mark.parametrize(
    ("pool", "role"),
    [
        ("workerpool0", "chief"),
        ("workerpool1", "worker"),
        ("workerpool2", "ps"),
        ("workerpool3", "evaluator"),
    ],
)
def test_cluster_spec(pool, role):
    cluster = Cluster.from_env({"CLUSTER_SPEC": pools(pool)})
    assert cluster.role == role
    assert cluster.has_evaluator
    assert cluster.evaluator_address == "e:1"
    assert cluster.num_ps == 1


def test_cluster_spec_of_one_replica_is_local():
    text = pools("workerpool0", workerpool0=["c:1"])
    assert Cluster.from_env({"CLUSTER_SPEC": text}).role == "local"


def test_tf_config_wins_but_cluster_spec_tells_of_the_evaluator():
    environ = {
        "TF_CONFIG": config(JOBS, task("chief")),
        "CLUSTER_SPEC": pools("workerpool0"),
    }
    cluster = Cluster.from_env(environ)
    assert cluster.has_evaluator
    assert cluster.num_ps == 2  # TF_CONFIG's.
    environ["CLUSTER_SPEC"] = pools("workerpool0", workerpool0=["c:1"])
    assert not Cluster.from_env(environ).has_evaluator


@pytest.mark.parametrize("variables", ["TF_CONFIG", "CLUSTER_SPEC", "both"])
@pytest.mark.parametrize("told", ["1", "0", None])
def test_reduction_servers_are_no_ps(variables, told):
    """Pool 2 is theirs as well; Vertex AI's variables do not tell."""
    environ = {
        "TF_CONFIG": config(JOBS, task("worker", 1)),
        "CLUSTER_SPEC": pools("workerpool1", 1),
    }
    if variables != "both":
        environ = {variables: environ[variables]}
    if told is not None:
        environ["TFDIST_REDUCTION_SERVERS"] = told
    cluster = Cluster.from_env(environ)
    assert (cluster.num_ps == 0) == (told == "1")
    assert (cluster.role, cluster.num_workers) == ("worker", 2)
    assert cluster.has_evaluator == (variables != "TF_CONFIG")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (pools("worker"), '"workerpool0", "workerpool1"'),
        (pools("workerpool0", chief=["c:1"]), 'Received: "chief"'),
        (pools("workerpool0", workerpool0=["c:1", "c:2"]), 'one "chief"'),
        (pools("workerpool1", 2), "one of the indices 0, 1"),
        ("[]", "must be a JSON object"),
    ],
)
def test_malformed_cluster_spec(text, part):
    with pytest.raises(ValueError, match="CLUSTER_SPEC is malformed") as info:
        Cluster.from_env({"CLUSTER_SPEC": text})
    assert part in str(info.value)
    assert "A right one: CLUSTER_SPEC='{" in str(info.value)


# --- Malformed -------------------------------------------------------------

WORKER = task("worker")
ADDRESS = 'must be "host:port"'


def workers(*addresses):
    return config({"chief": ["c:1"], "worker": list(addresses)}, WORKER)


# (id, TF_CONFIG, part of the message). The launcher's and trainer's tests run
# whole programs on this list.
MALFORMED_TF_CONFIGS = [
    ("bad JSON", '{"cluster": {"chief": ["c:1"]', "must be JSON"),
    ("single quotes", "{'cluster': {}}", "must be JSON"),
    ("nested too deep", "[" * 50_000, "must be JSON"),
    ("a list", '["c:1"]', 'must be a JSON object with the keys "cluster"'),
    ("a string", '"c:1"', "must be a JSON object"),
    ("null", "null", "must be a JSON object"),
    (
        "a key twice",
        '{"cluster": {"chief": ["a:1"], "chief": ["b:1"]}}',
        'The key "chief" is given twice',
    ),
    ("cluster is a list", config(["c:1"]), '"cluster" must be a JSON object'),
    ("cluster is an empty list", '{"cluster": []}', "must be a JSON object"),
    ("task is a string", config(JOBS, "chief"), '"task" must be a JSON object'),
    (
        "job is a string",
        config({"chief": "c:1"}),
        "must be a list of addresses",
    ),
    ("a misspelt key", '{"Clusters": {}}', 'must be spelled "cluster"'),
    ("job is null", '{"cluster": {"chief": null}}', "must be a list"),
    ("job is a number", config({"chief": 2222}), '{"chief": 2222}'),
    (
        "unknown job",
        config({**JOBS, "learner": ["l:1"]}, task("chief")),
        'one of "chief", "worker", "ps", "evaluator", "dispatcher", '
        '"data_worker", "master". Received: "learner"',
    ),
    ("capital letters", config({"Chief": ["c:1"]}), 'Received: "Chief"'),
    ("unknown task type", config(JOBS, task("server")), 'Received: "server"'),
    ("task type is a number", config(JOBS, task(7)), "Received: 7"),
    ("no task", config(JOBS), '"task" must have the key "type"'),
    ("no type", config(JOBS, {"index": 0}), 'must have the key "type"'),
    ("no index", config(JOBS, {"type": "ps"}), 'must have the key "index"'),
    (
        "index out of range",
        config(JOBS, task("worker", 2)),
        'The task "worker" must have one of the indices 0, 1. '
        'Received: {"index": 2}',
    ),
    ("negative index", config(JOBS, task("ps", -1)), "non-negative integer"),
    ("index is a word", config(JOBS, task("ps", "one")), 'Received: "one"'),
    ("index is a float", config(JOBS, task("ps", 1.0)), "Received: 1.0"),
    ("index is true", config(JOBS, task("ps", True)), "Received: true"),
    (
        "task of a missing job",
        config({"chief": ["c:1"], "worker": ["w:1"]}, task("ps")),
        'The task "ps" must be part of the cluster, which has: chief, 1 worker',
    ),
    ("ps without cluster", config(task=task("ps")), "which has: no tasks"),
    ("worker 1 without cluster", config(task=task("worker", 1)), "indices 0"),
    (
        "two chiefs",
        config({"chief": ["a:1", "b:1"]}, task("chief")),
        'only be one "chief"',
    ),
    ("chief 1", config({"chief": {"1": "a:1"}}, task("chief", 1)), "index 0"),
    (
        "chief and master",
        config({"chief": ["a:1"], "master": ["b:1"]}, task("chief")),
        "but not both",
    ),
    (
        "ps without workers",
        config({"chief": ["c:1"], "ps": ["p:1"]}, task("chief")),
        'must also have a "worker"',
    ),
    (
        "ps without chief",
        config({"worker": ["w:1"], "ps": ["p:1"]}, WORKER),
        'must also have a "chief"',
    ),
    (
        "ps with a gap",
        config({**JOBS, "ps": {"0": "p:1", "2": "p:2"}}, task("chief")),
        "without a gap",
    ),
    (
        "nobody leads",
        config({"worker": {"1": "a:1", "2": "b:1"}}, task("worker", 1)),
        "worker 0 leads",
    ),
    ("evaluator 1", config(JOBS, task("evaluator", 1)), "must have one of"),
    (
        "two evaluators",
        config({**JOBS, "evaluator": ["a:1", "b:1"]}, task("evaluator")),
        'only be one "evaluator"',
    ),
    (
        "two dispatchers",
        config({**JOBS, "dispatcher": ["a:1", "b:1"]}, task("chief")),
        'only be one "dispatcher"',
    ),
    (
        "dispatcher without a data worker",
        config({**JOBS, "dispatcher": ["a:1"]}, task("chief")),
        'at least one "data_worker"',
    ),
    (
        "data worker without a dispatcher",
        config({**JOBS, "data_worker": ["a:1"]}, task("chief")),
        'needs a "dispatcher"',
    ),
    (
        "data worker with a gap",
        config({**DATA, "data_worker": {"1": "f:1"}}, task("chief")),
        "without a gap",
    ),
    (
        "data worker on the chief's address",
        config({**DATA, "data_worker": ["c:1"]}, task("chief")),
        "chief:0 and data_worker:0 must not share an address",
    ),
    ("data worker 2", config(DATA, task("data_worker", 2)), "indices 0, 1."),
    (
        "index that is no number",
        config({"worker": {"first": "a:1"}}, WORKER),
        'An index in the job "worker" must be',
    ),
    (
        "index twice",
        config({"worker": {"0": "a:1", "00": "b:1"}}, WORKER),
        "two tasks with the index 0",
    ),
    ("duplicate address", workers("w:1", "w:1"), "must not share an address"),
    (
        "duplicate across jobs",
        workers("C:1", "w:1"),
        "chief:0 and worker:0 must not share an address",
    ),
    ("no port", workers("w"), f"The address of worker:0 {ADDRESS}"),
    ("empty port", workers("w:"), ADDRESS),
    ("port 0", workers("w:0"), ADDRESS),
    ("port 65536", workers("w:65536"), ADDRESS),
    ("port is a name", workers("w:http"), 'Received: "w:http"'),
    ("scheme", workers("grpc://w:1"), 'Received: "grpc://w:1"'),
    ("blank", workers(" w:1"), 'Received: " w:1"'),
    ("no host", workers(":1"), ADDRESS),
    ("empty address", workers(""), 'Received: ""'),
    ("bare IPv6", workers("::1:2222"), "IPv6 in brackets"),
    ("bad IPv6", workers("[::g]:1"), ADDRESS),
    ("address is a number", workers(2222), "Received: 2222"),
    ("address is null", workers(None), "Received: null"),
    ("address is a list", workers(["w:1"]), 'Received: ["w:1"]'),
]


@pytest.mark.parametrize(
    ("text", "part"),
    [row[1:] for row in MALFORMED_TF_CONFIGS],
    ids=[row[0] for row in MALFORMED_TF_CONFIGS],
)
def test_malformed_tf_config(text, part):
    with pytest.raises(ValueError, match="TF_CONFIG is malformed") as info:
        read(text)
    message = str(info.value)
    assert part in message
    example = message.rpartition("A right one: TF_CONFIG=")[2].strip("'")
    assert read(example).role == "worker"
    assert len(message) < 800


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*JOBS, "cluster", "task", "type", "index"])
            | st.text(),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(st.text() | JSON.map(json.dumps) | st.builds(config, JSON, JSON))
def test_anything_else_is_a_value_error(text):
    # Any other exception fails the test.
    with contextlib.suppress(ValueError):
        assert isinstance(read(text), Cluster)


def test_constructor_checks_too():
    with pytest.raises(ValueError, match="must also have a"):
        Cluster({"ps": {0: "p:1"}}, "ps")
    with pytest.raises(ValueError, match="must be part of the cluster"):
        Cluster().tf_config("evaluator", 0)


# --- The value -------------------------------------------------------------


@st.composite
def clusters(draw):
    """Valid clusters with any of their tasks as the own one."""
    num_ps = draw(st.integers(0, 3))
    has_chief = num_ps > 0 or draw(st.booleans())
    jobs = {"chief": [0]} if has_chief else {}
    gaps = draw(st.sets(st.integers(0, 9), max_size=4))
    jobs["worker"] = sorted(gaps | ({0} if num_ps or not has_chief else set()))
    jobs["ps"] = list(range(num_ps))
    jobs["evaluator"] = [0] * draw(st.integers(0, 1))
    jobs["data_worker"] = list(range(draw(st.integers(0, 2))))
    jobs["dispatcher"] = [0] * bool(jobs["data_worker"])
    nodes = [(job, index) for job in jobs for index in jobs[job]]
    ports = draw(st.permutations(range(1000, 1000 + len(nodes))))
    hosts = st.sampled_from(["host", "10.0.0.1", "a-b.c_d.svc", "[::1]"])
    spec = {job: {} for job in jobs}
    for (job, index), port in zip(nodes, ports, strict=True):
        spec[job][index] = f"{draw(hosts)}:{port}"
    return Cluster.from_jobs(spec, *draw(st.sampled_from(nodes)))


@given(clusters(), st.data())
def test_tf_config_round_trip(cluster, data):
    assert read(cluster.tf_config()) == cluster
    nodes = [(j, i) for j in cluster.tasks for i in cluster.tasks[j]]
    if cluster.has_evaluator:
        nodes.append(("evaluator", 0))
    nodes += [("data_worker", i) for i in range(len(cluster.data_workers))]
    job, index = data.draw(st.sampled_from(nodes))
    other = read(cluster.tf_config(job, index))
    assert (other.task_type, other.task_index) == (job, index)
    assert other.tasks == cluster.tasks
    assert other.has_evaluator == cluster.has_evaluator


@given(clusters())
def test_exactly_one_task_leads(cluster):
    nodes = [(j, i) for j in cluster.tasks for i in cluster.tasks[j]]
    told = [read(cluster.tf_config(*node)) for node in nodes]
    assert sum(member.is_chief for member in told) == 1


@given(clusters())
def test_copies_are_equal(cluster):
    for twin in (
        pickle.loads(pickle.dumps(cluster)),
        copy.deepcopy(cluster),
    ):
        assert twin == cluster
        assert hash(twin) == hash(cluster)


def test_it_is_frozen():
    cluster = Cluster.from_jobs(JOBS, "chief", 0)
    with pytest.raises(AttributeError):
        cluster.task_type = "ps"
    with pytest.raises(TypeError):
        cluster.tasks["ps"] = {}
    with pytest.raises(TypeError):
        cluster.tasks["ps"][0] = "x:1"


def test_tf_config_puts_the_evaluator_inside_as_kubeflow_does():
    jobs = {**JOBS, "evaluator": ["e:1"]}
    text = Cluster.from_jobs(jobs, "chief", 0).tf_config("worker", 1)
    assert json.loads(text) == {
        "cluster": jobs,
        "task": {"type": "worker", "index": 1},
    }


def test_imports_no_tensorflow():
    code = (
        "import sys, tfdist.cluster.spec; sys.exit('tensorflow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
