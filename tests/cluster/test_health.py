import contextlib

import pytest

from tfdist._tf.waiting import wait_for
from tfdist.cluster import health
from tfdist.cluster.spec import Cluster
from tfdist.launch.network import reserve_ports


@pytest.fixture
def cluster():
    """One of which nobody is up."""
    with contextlib.ExitStack() as held:
        ports = [held.enter_context(p) for p in reserve_ports(3)]
        chief, worker, ps = (f"127.0.0.1:{p.getsockname()[1]}" for p in ports)
        jobs = {"chief": [chief], "worker": [worker], "ps": [ps]}
        yield Cluster.from_jobs(jobs, "chief", 0)


def test_tasks_are_asked_at_once_when_a_call_has_failed(cluster, monkeypatch):
    monkeypatch.setattr(health, "_ROUND_SECS", 3600.0)
    monitor = health.HealthMonitor(cluster)
    try:
        assert not monitor.lost()  # Asked once, it may be about to start.
        monitor.hurry()
        lost = wait_for(lambda: monitor.lost() or None, timeout_secs=60)
        assert lost == {"ps:0": health.ServerFailure.DEAD}
    finally:
        monitor.stop()
    assert wait_for(lambda: not monitor._thread.is_alive(), timeout_secs=60)
