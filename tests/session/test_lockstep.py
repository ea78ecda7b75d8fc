"""All-reduce processes stay at the same step; tested in one process."""

import pytest
import tensorflow as tf

from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.session import lockstep


class Told:
    """Fake peers of a leader or follower that receives `commands`."""

    name = "worker:0"

    def __init__(self, commands):
        self._commands = iter(commands)

    def tell(self, **command):
        pass

    def announce(self, what):
        pass

    def wait_for_others(self, what, watch):
        pass

    def next(self, watch):
        return next(self._commands)


@pytest.fixture
def follower(tmp_path, monkeypatch):
    """Creates a worker's `Lockstep`, outside a session."""

    def make(commands, positions=None):
        peers = Told(commands)
        monkeypatch.setattr(lockstep, "Peers", lambda cluster: peers)
        jobs = {"chief": ["localhost:1"], "worker": ["localhost:2"]}
        return lockstep.Lockstep(
            Cluster.from_jobs(jobs, "worker", 0),
            str(tmp_path),
            sigterm=type("Sigterm", (), {"received": False}),
            watch=lambda: None,
            positions=positions,
        )

    return make


def test_positions_are_saved_by_one_object(tmp_path, follower):
    """The session keeps every object it creates, to wait for its writes."""
    made, data = [], iter(tf.data.Dataset.range(9))

    def positions(directory):
        made.append(Checkpoints(directory, {}, iterator_fn=lambda: data))
        return made[-1]

    saves = [{"save": step} for step in range(1, 8)]
    group = follower([*saves, {"run": 3}], positions)
    assert group.next("run") == 3
    group.save_positions(8)
    assert len(made) == 1
    found = (tmp_path / "inputs/worker-0-of-2").glob("*.index")
    assert sorted(path.stem for path in found) == [
        f"model.ckpt-{step}" for step in range(4, 9)
    ]


@pytest.mark.parametrize("command", [{"run": 3}, {"end": True}])
def test_a_hook_that_the_leader_has_not(command, follower):
    """Such a hook would consume the announcement meant for the next steps."""
    group = follower([{"agreed": 1}, command])
    assert group.next("agreed") == 1
    with pytest.raises(RuntimeError, match="must have the same hooks"):
        group.next("agreed")
