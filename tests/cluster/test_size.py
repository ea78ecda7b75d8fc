"""How many workers train, as a file says."""

import contextlib
import json
import math

import pytest

from tfdist import Cluster
from tfdist._tf.waiting import wait_for
from tfdist.cluster import size
from tfdist.cluster.probing import Answer, TaskState
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.tf_config import SIZE_VARIABLE

CLUSTER = Cluster.from_jobs(
    {"chief": ["c:1"], "worker": ["w:1", "w:2", "w:3", "w:4"], "ps": ["p:1"]},
    "chief",
    0,
)


def ask_for(directory, number, **others):
    """Writes the file, at once."""
    directory.mkdir(exist_ok=True)
    temporary = directory / "temporary"
    temporary.write_text(json.dumps({"workers": number, **others}))
    temporary.replace(directory / "cluster.json")


@pytest.fixture
def up(monkeypatch):
    """Addresses of the workers that answer."""
    addresses = set()

    def ask(asked):
        states = TaskState.DEAD, TaskState.LIVE
        return [Answer(states[address in addresses]) for address in asked]

    monkeypatch.setattr(size.probing, "ask", ask)
    monkeypatch.setattr(size, "_ROUND_SECS", 0.01)
    monkeypatch.setattr(size, "_TOGETHER_SECS", 0.5)
    return addresses


def test_all_without_a_file(tmp_path, monkeypatch):
    for directory in (None, str(tmp_path)):
        found = ClusterSize(CLUSTER, directory)
        assert (found.size, found.may_change, found.due()) == (4, False, None)
    ask_for(tmp_path, 2)
    found = ClusterSize(CLUSTER, str(tmp_path))
    assert found.now.addresses("worker") == {
        "worker:0": "w:1",
        "worker:1": "w:2",
    }
    monkeypatch.setenv(SIZE_VARIABLE, str(tmp_path / "cluster.json"))
    assert ClusterSize(CLUSTER, None).size == 2


@pytest.mark.parametrize(
    "text",
    [
        *("", "3", "{}", '{"workers": 0}', '{"workers": true}'),
        '{"workers": 3, "min_worker": 2}',
    ],
)
def test_malformed(tmp_path, text):
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(ValueError, match="must say how many workers train"):
        ClusterSize(CLUSTER, str(tmp_path))
    ask_for(tmp_path, 5)
    with pytest.raises(ValueError, match=r"asks for 5 workers .* names 4"):
        ClusterSize(CLUSTER, str(tmp_path))


@contextlib.contextmanager
def watched(directory):
    """A size of one, whose file is looked at meanwhile."""
    ask_for(directory, 1)
    found = ClusterSize(CLUSTER, str(directory))
    found.watch()
    try:
        yield found
    finally:
        found.stop()


def test_follows_the_file(tmp_path, up, caplog):
    with watched(tmp_path) as found:
        up |= {"w:2", "w:3"}
        ask_for(tmp_path, 3)
        assert wait_for(lambda: found.due() == 3, 10)
        found.size = 3
        # The file asks for one that is not there, and does not come.
        ask_for(tmp_path, 4)
        assert wait_for(lambda: found.wanted == 4, 10)
        assert found.due() is None
        up |= {"w:4"}
        assert wait_for(lambda: found.due() == 4, 10)
        found.size = 4
        (tmp_path / "cluster.json").write_text("nonsense")
        assert wait_for(lambda: "stays as it is" in caplog.text, 10)
        assert found.due() is None
        ask_for(tmp_path, 1)  # Whoever is there.
        assert wait_for(lambda: found.due() == 1, 10)
        assert not found.is_late(5)


def test_goes_on_with_those_that_are_there(tmp_path, up):
    with watched(tmp_path) as found:
        up |= {"w:2", "w:4"}
        ask_for(tmp_path, 4)
        assert wait_for(lambda: found.wanted == 4, 10)
        assert found.due() is None  # The third may come yet.
        assert wait_for(lambda: found.due() == 2, 10)
    up |= {"w:1"}
    assert found.there() == 2


def test_other_ps(tmp_path, up):
    jobs = {"chief": ["c:1"], "worker": ["w:1"], "ps": ["p:1", "p:2", "p:3"]}
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    ask_for(tmp_path, 1, ps=2)
    found = ClusterSize(cluster, str(tmp_path))
    assert [*found.now.addresses("ps").values()] == ["p:1", "p:2"]
    found.watch()
    try:
        ask_for(tmp_path, 1, ps=3)
        assert wait_for(lambda: found.change == "ps: 2 -> 3", 10)
        assert not found.is_ready()  # It is not up.
        up |= {"p:3"}
        assert wait_for(found.is_ready, 10)
        found.refuse()
        assert found.change is None
        content = json.loads((tmp_path / "cluster.json").read_text())
        assert content == {"workers": 1, "ps": 2}
        (tmp_path / "cluster.json").write_text("nonsense")  # Meanwhile.
        found.refuse()
        assert (tmp_path / "cluster.json").read_text() == "nonsense"
        (tmp_path / "cluster.json").write_text('{"ps": 1}')
        assert wait_for(lambda: found.change == "ps: 2 -> 1", 10)
        assert (found.is_ready(), found.shrinks, found.due()) == (1, 1, None)
        (tmp_path / "cluster.json").write_text('{"workers": 1}')  # All ps.
        assert wait_for(lambda: found.change == "ps: 2 -> 3", 10)
    finally:
        found.stop()
    ask_for(tmp_path, 1, ps=4)
    with pytest.raises(ValueError, match=r"and 4 ps, .* names 1 and 3"):
        ClusterSize(cluster, str(tmp_path))


# --- All-reduce ---------------------------------------------------------------

GROUP = Cluster.from_jobs(
    {"chief": ["c:1"], "worker": ["w:1", "w:2", "w:3", "w:4"]}, "chief", 0
)


def test_a_group_has_whoever_is_there(tmp_path, up):
    """Of those wanted; TensorFlow connects all of them anew."""
    ask_for(tmp_path, 3, min_workers=2, last_call_timeout=7)
    size = ClusterSize(GROUP, str(tmp_path))
    assert (size.least, size.last_call_timeout) == (2, 7.0)
    assert [*size.asked.addresses("worker").values()] == ["w:1", "w:2", "w:3"]
    jobs = {"chief": ["c:1"], "worker": ["w:2", "w:3"]}
    size.follow(Cluster.from_jobs(jobs, "chief", 0))
    assert size.size == 2
    size.watch()
    try:
        assert wait_for(lambda: size._due == 2, 10)  # Some time is over.
        assert size.due() is None
        up |= {"w:1"}
        assert wait_for(lambda: size.due() == 3, 10)
        ask_for(tmp_path, 1, min_workers=2)
        assert wait_for(lambda: size.due() == 1, 10)
        size.refuse()
        content = json.loads((tmp_path / "cluster.json").read_text())
        assert content == {"workers": 3, "min_workers": 2}
    finally:
        size.stop()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"workers": 1}, "all-reduce needs two processes"),
        ({"workers": 2, "min_workers": 0}, "must say how many"),
        ({"workers": 2, "last_call_timeout": "x"}, "must say how many"),
        ({"workers": 2, "last_call_timeout": math.nan}, "must say how many"),
    ],
)
def test_a_group_that_cannot_be(tmp_path, content, message):
    ask_for(tmp_path, content.pop("workers"), **content)
    alone = Cluster.from_jobs({"worker": ["w:1", "w:2"]}, "worker", 0)
    with pytest.raises(ValueError, match=message):
        ClusterSize(alone, str(tmp_path))
