"""How the tasks of an all-reduce job find each other."""

import socket
from concurrent import futures

import grpc
import pytest

from tests.cluster.test_servers import free_addresses
from tfdist.cluster import peers, probing
from tfdist.cluster.spec import Cluster

GREET = f"/{peers._MEETING}/Greet"


def clusters(count):
    """A job of workers, as each of its tasks sees it."""
    jobs = {"worker": free_addresses(count)}
    return [Cluster.from_jobs(jobs, "worker", i) for i in range(count)]


@pytest.fixture
def pair():
    """This task, and the address of another one that answers `identity`."""
    own, other = clusters(2)
    methods = {
        "Greet": grpc.unary_unary_rpc_method_handler(lambda *_: b"identity")
    }
    server = grpc.server(
        futures.ThreadPoolExecutor(2),
        [grpc.method_handlers_generic_handler(peers._MEETING, methods)],
    )
    server.add_insecure_port(other.address)
    server.start()
    yield own, other.address
    server.stop(None).wait()


def test_all_that_meet_go_on():
    tasks = clusters(3)
    with futures.ThreadPoolExecutor(3) as pool:
        meeting = [pool.submit(peers.meet, task, 60.0) for task in tasks[:2]]
        assert not futures.wait(meeting, timeout=1.0).done
        meeting.append(pool.submit(peers.meet, tasks[2], 60.0))
        for each in meeting:
            assert each.result(60.0) is None


def test_one_that_is_not_there_is_named():
    tasks = clusters(3)
    with futures.ThreadPoolExecutor(2) as pool:
        meeting = [pool.submit(peers.meet, task, 1.0) for task in tasks[:2]]
        for each in meeting:
            error = str(each.exception(60.0))
            assert "1 task(s) of the cluster did not come up" in error
            assert f"worker:2 at {tasks[2].address} (not up)" in error


@pytest.mark.parametrize(
    ("asks_as", "meets"),
    [(None, False), (b"earlier!", False), (b"identity", True)],
)
def test_both_must_ask(pair, asks_as, meets):
    """The one that has asked must be the process that answers now."""
    own, address = pair
    with grpc.insecure_channel(own.address) as channel:
        if asks_as:
            # It is sent when this task listens, and cancelled if not held.
            request = channel.unary_unary(GREET).future(
                asks_as + address.encode(), wait_for_ready=True
            )
        if meets:
            peers.meet(own, 60.0)
            assert len(request.result()) == 8
            return
        apart = rf"worker:1 at {address} \(up, but has not reached this task\)"
        with pytest.raises(TimeoutError, match=apart):
            peers.meet(own, 1.5)


def test_a_frozen_task_is_named(monkeypatch):
    """Its port still takes connections."""
    own, other = clusters(2)
    ask = probing.ask
    monkeypatch.setattr(peers, "ask", lambda *a, **k: ask(*a, 0.3, **k))
    host, port = other.address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(TimeoutError, match="but does not answer"),
    ):
        peers.meet(own, 0.5)


def test_the_wait_can_be_given_up():
    with pytest.raises(ZeroDivisionError):
        peers.meet(clusters(2)[0], 60.0, lambda: 1 / 0)


def test_port_in_use(pair):
    own, address = pair
    taken = Cluster.from_jobs(own.tasks, "worker", 1)
    with pytest.raises(RuntimeError, match=f"worker:1 .*{address}.*that port"):
        peers.meet(taken, 1.0)
