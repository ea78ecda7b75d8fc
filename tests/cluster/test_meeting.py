"""How the tasks of an all-reduce job find each other."""

import re
import socket
from concurrent import futures

import grpc
import pytest

from tests.cluster.test_servers import free_addresses
from tests.cluster.test_size import ask_for
from tfdist._tf.waiting import wait_for
from tfdist.cluster import meeting, probing
from tfdist.cluster.peers import Peers
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.spec import Cluster

DEAD, LIVE = probing.TaskState.DEAD, probing.TaskState.LIVE
GREET = f"/{meeting._MEETING}/Greet"


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
        [grpc.method_handlers_generic_handler(meeting._MEETING, methods)],
    )
    server.add_insecure_port(other.address)
    server.start()
    yield own, other.address
    server.stop(None).wait()


def test_all_that_meet_go_on():
    tasks = clusters(3)
    with futures.ThreadPoolExecutor(3) as pool:
        all_meet = [pool.submit(meeting.meet, task, 60.0) for task in tasks[:2]]
        assert not futures.wait(all_meet, timeout=1.0).done
        all_meet.append(pool.submit(meeting.meet, tasks[2], 60.0))
        for each in all_meet:
            assert each.result(60.0) in tasks


def test_who_asks_for_the_process_of_before_hears_that_it_is_gone():
    """Then it recovers: it did not from TensorFlow's "Method not found!"."""
    own, _ = clusters(2)
    meets = meeting._Meeting(own.address, 60.0, None)
    with meets.listening(own), grpc.insecure_channel(own.address) as channel:
        for method in ("CoordinationService/GetKeyValue", "WorkerService/X"):
            with pytest.raises(grpc.RpcError) as raised:
                channel.unary_unary(f"/tensorflow.{method}")(b"", timeout=30)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE


def test_one_whose_last_answer_came_too_late():
    """It has asked, has met this task, and left its address to TensorFlow."""
    own, other = clusters(2)
    handler = grpc.method_handlers_generic_handler
    status = grpc.unary_unary_rpc_method_handler(lambda *_: b"of TensorFlow")
    server = grpc.server(
        futures.ThreadPoolExecutor(2),
        [handler("tensorflow.WorkerService", {"GetStatus": status})],
    )
    server.add_insecure_port(other.address)
    server.start()
    meets = meeting._Meeting(own.address, 60.0, None)
    try:
        with meets.listening(own):
            assert meets.states({other.task: other.address}) == [DEAD]
            with grpc.insecure_channel(own.address) as channel:
                request = b"identity" + other.address.encode()
                channel.unary_unary(GREET)(request, timeout=30)
            assert meets.states({other.task: other.address}) == [LIVE]
    finally:
        server.stop(None).wait()


def test_another_cluster_is_named_in_both():
    first, second = clusters(2)
    jobs = {"worker": [first.address, second.address, "elsewhere:1"]}
    wider = Cluster.from_jobs(jobs, "worker", 1)
    with futures.ThreadPoolExecutor(2) as pool:
        both_meet = [pool.submit(meeting.meet, t, 60.0) for t in (first, wider)]
        for each, other in zip(
            both_meet, ("worker:1", "worker:0"), strict=True
        ):
            error = each.exception(30.0)
            assert isinstance(error, ValueError)
            expected = f"{other} was started with another cluster: .*TF_CONFIG"
            assert re.match(expected, str(error))
            assert '"worker:2": "elsewhere:1"' in str(error)


def test_one_that_is_not_there_is_named():
    tasks = clusters(3)
    with futures.ThreadPoolExecutor(2) as pool:
        all_meet = [pool.submit(meeting.meet, task, 1.0) for task in tasks[:2]]
        for each in all_meet:
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
            meeting.meet(own, 60.0)
            assert len(request.result()) == 8
            return
        apart = rf"worker:1 at {address} \(up, but has not reached this task\)"
        with pytest.raises(TimeoutError, match=apart):
            meeting.meet(own, 1.5)


def test_a_frozen_task_is_named(monkeypatch):
    """Its port still takes connections."""
    own, other = clusters(2)
    ask = probing.ask
    monkeypatch.setattr(meeting, "ask", lambda *a, **k: ask(*a, 0.3, **k))
    host, port = other.address.split(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(TimeoutError, match="but does not answer"),
    ):
        meeting.meet(own, 0.5)


def test_the_wait_can_be_given_up():
    with pytest.raises(ZeroDivisionError):
        meeting.meet(clusters(2)[0], 60.0, lambda: 1 / 0)


def test_port_in_use(pair):
    own, address = pair
    taken = Cluster.from_jobs(own.tasks, "worker", 1)
    with pytest.raises(RuntimeError, match=f"worker:1 .*{address}.*that port"):
        meeting.meet(taken, 1.0)


# --- A group that changes its size --------------------------------------------


@pytest.fixture
def rendezvous(tmp_path):
    """Has tasks meet whose group is of the size that a file says."""
    ask_for(tmp_path, 4, min_workers=3, last_call_timeout=1.5)

    def meet(task, secs=60.0):
        return meeting.meet(task, secs, size=ClusterSize(task, str(tmp_path)))

    return meet


@pytest.mark.slow
def test_those_who_are_there_go_on(rendezvous):
    """Numbered anew; what comes later waits, and can be seen to do so."""
    tasks = clusters(4)
    with futures.ThreadPoolExecutor(4) as pool:
        first = [pool.submit(rendezvous, tasks[i]) for i in (0, 3)]
        assert not futures.wait(first, timeout=3.0).done  # Two of three.
        first.append(pool.submit(rendezvous, tasks[2]))
        groups = [each.result(60.0) for each in first]
        addresses = [tasks[i].address for i in (0, 2, 3)]
        assert [g.task for g in groups] == ["worker:0", "worker:2", "worker:1"]
        for group in groups:
            assert [*group.addresses().values()] == addresses
        late = pool.submit(rendezvous, tasks[1], 4.0)
        assert wait_for(
            lambda: probing.probe(tasks[1].address) is probing.TaskState.LIVE, 3
        )
        assert "worker:0 at" in str(late.exception(60.0))


def test_all_go_on_at_once(rendezvous):
    tasks = clusters(4)
    with futures.ThreadPoolExecutor(4) as pool:
        groups = [*pool.map(rendezvous, tasks)]
    assert groups == tasks


def test_one_that_is_not_wanted_waits(tmp_path, rendezvous):
    ask_for(tmp_path, 3)
    tasks = clusters(4)
    with futures.ThreadPoolExecutor(4) as pool:
        waits = pool.submit(rendezvous, tasks[3], 3.0)
        for group in pool.map(rendezvous, tasks[:3]):
            assert group.num_workers == 3
        assert isinstance(waits.exception(60.0), TimeoutError)


def test_an_error_that_is_no_text_can_be_told():
    """A file's name may have any bytes; TensorFlow sends UTF-8."""
    peers = Peers.__new__(Peers)
    peers.name = "worker:1"
    reason = peers._reason(FileNotFoundError("x\udcff.csv"))
    assert reason == r"worker:1 has failed: FileNotFoundError: x\udcff.csv"
