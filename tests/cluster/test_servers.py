import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist._tf.waiting import wait_for
from tfdist.cluster import probing, servers
from tfdist.cluster.probing import TaskState, probe
from tfdist.cluster.spec import Cluster
from tfdist.launch import network
from tfdist.launch.testing import LocalCluster, assert_nothing_left

DEADLINE = 60.0
SERVE = "from tfdist import cluster; cluster.serve(cluster.Cluster.from_env())"


def wait_until(condition):
    assert wait_for(condition, DEADLINE)


def free_addresses(count):
    holders = network.reserve_ports(count)
    addresses = [f"127.0.0.1:{h.getsockname()[1]}" for h in holders]
    for holder in holders:
        holder.close()
    return addresses


@pytest.fixture(scope="module")
def jobs():
    chief, worker, ps = free_addresses(3)
    return {"chief": [chief], "worker": [worker], "ps": [ps]}


@pytest.fixture(scope="module")
def server(jobs):
    """The process of ps:0; worker:0 is never started."""
    process = start_ps(jobs)
    wait_until(lambda: probe(jobs["ps"][0]) is TaskState.LIVE)
    yield process
    process.kill()
    process.wait()


def start_ps(jobs, **popen):
    task = {"cluster": jobs, "task": {"type": "ps", "index": 0}}
    environment = {**os.environ, "TF_CONFIG": json.dumps(task)}
    return subprocess.Popen(
        [sys.executable, "-c", SERVE],
        env={**environment, "TF_CPP_MIN_LOG_LEVEL": "2"},
        cwd=str(Path(__file__).parents[2]),
        **popen,
    )


@contextlib.contextmanager
def frozen(process):
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def test_probe_of_a_live_server(server, jobs):
    assert probe(jobs["ps"][0]) is TaskState.LIVE


def test_probe_of_nobody(jobs):
    start = time.monotonic()
    assert probe(jobs["worker"][0]) is TaskState.DEAD
    assert time.monotonic() - start < 2


def test_probe_of_a_frozen_server(server, jobs):
    address = jobs["ps"][0]
    with frozen(server):
        assert probe(address) is TaskState.FROZEN
    wait_until(lambda: probe(address) is TaskState.LIVE)


def test_missing_tasks_are_named(server, jobs, caplog):
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    with pytest.raises(TimeoutError) as raised:
        probing.wait_until_up(cluster, timeout_secs=0.3)
    message = str(raised.value)
    assert f"worker:0 at {jobs['worker'][0]} (not up)" in message
    assert "ps:0" not in message
    assert "session_creation_timeout_secs" in message


def test_frozen_tasks_are_named(server, jobs, monkeypatch):
    ask = probing.ask
    monkeypatch.setattr(
        probing, "ask", lambda addresses, secs=1.0: ask(addresses, secs)
    )
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    with frozen(server), pytest.raises(TimeoutError, match="does not answer"):
        probing.wait_until_up(cluster, timeout_secs=0.3)
    wait_until(lambda: probe(jobs["ps"][0]) is TaskState.LIVE)


def test_waiting_is_visible(server, jobs, caplog, monkeypatch):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    with caplog.at_level("INFO", "tfdist"), pytest.raises(TimeoutError):
        probing.wait_until_up(cluster, timeout_secs=20)
    assert "Waiting for worker:0" in caplog.text


def test_a_proxy_is_named(jobs, monkeypatch):
    """gRPC goes through it, even to this machine."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    cluster = Cluster.from_jobs(jobs, "chief", 0)
    with pytest.raises(TimeoutError, match="from here past http_proxy"):
        probing.wait_until_up(cluster, timeout_secs=0.3)


UNTIL_A_FILE = """
import pathlib, signal, time
from tfdist import cluster
from tfdist.cluster import servers, strategies
task = cluster.Cluster.from_env()
if task.role == "chief":
    strategies.parameter_server_strategy(task)
    print("connected", flush=True)
    while not pathlib.Path("ends").exists():
        time.sleep(0.1)
    servers.release(task)
else:
    cluster.serve(task)
    # What this program does afterwards can be ended again.
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
"""


@pytest.mark.slow
@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])
def test_sigterm_shortly_before_the_end(tmp_path, monkeypatch, proxy):
    """Nobody starts a task again whose job is done; no proxy is asked."""
    monkeypatch.setenv("http_proxy", proxy)
    (tmp_path / "job.py").write_text(UNTIL_A_FILE)
    job = [sys.executable, "job.py"]
    with LocalCluster(job, ps=1, workers=1, cwd=tmp_path) as cluster:
        cluster.wait_for_line("chief:0", "connected", timeout_secs=DEADLINE)
        os.kill(cluster.pid("worker:0"), signal.SIGTERM)
        time.sleep(1)
        (tmp_path / "ends").touch()
        assert cluster.wait(timeout_secs=DEADLINE) == 0
        wait_until(lambda: bool(cluster.exit_codes()["worker:0"]))
        assert cluster.exit_codes()["worker:0"] == [0]
    assert_nothing_left(cluster)


@pytest.mark.slow
def test_port_in_use(server, jobs):
    second = start_ps(jobs, stderr=subprocess.PIPE, text=True)
    _, errors = second.communicate(timeout=DEADLINE)
    assert second.returncode == 1
    assert "The server of task ps:0 could not start" in errors
    assert jobs["ps"][0] in errors


def test_thread_pool_has_four_threads_at_least(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert servers.inter_op_threads() == 4
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(9)))
    assert servers.inter_op_threads() == 9


def test_release_skips_a_server_that_is_gone(server, jobs, caplog):
    """The worker was never started; to the ps this process is no chief."""
    servers.release(Cluster.from_jobs(jobs, "chief", 0))
    assert "worker:0 could not be told that the job is done: not up" in (
        caplog.text
    )
    assert "ps:0 could not be told" in caplog.text


def test_dead_server(server, jobs):
    """The last test of this server."""
    server.kill()
    server.wait()
    assert probe(jobs["ps"][0]) is TaskState.DEAD
