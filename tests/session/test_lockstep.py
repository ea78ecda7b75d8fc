"""Processes of all-reduce at the same step, without other processes."""

import tensorflow as tf

from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.cluster.spec import Cluster
from tfdist.session import lockstep


class Told:
    """Peers of a leader or a follower whom `commands` are told."""

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


def test_positions_are_saved_by_one_object(tmp_path, monkeypatch):
    """A session keeps all that it makes, to wait for what they write."""
    saves = [{"save": step} for step in range(1, 8)]
    peers = Told([*saves, {"run": 3}])
    monkeypatch.setattr(lockstep, "Peers", lambda cluster: peers)
    made, data = [], iter(tf.data.Dataset.range(9))

    def positions(directory):
        made.append(Checkpoints(directory, {}, iterator_fn=lambda: data))
        return made[-1]

    jobs = {"chief": ["localhost:1"], "worker": ["localhost:2"]}
    group = lockstep.Lockstep(
        Cluster.from_jobs(jobs, "worker", 0),
        str(tmp_path),
        sigterm=type("Sigterm", (), {"received": False}),
        watch=lambda: None,
        positions=positions,
    )
    assert group.next("run") == 3
    group.save_positions(8)
    assert len(made) == 1
    found = (tmp_path / "inputs/worker-0-of-2").glob("*.index")
    assert sorted(path.stem for path in found) == [
        f"model.ckpt-{step}" for step in range(4, 9)
    ]
