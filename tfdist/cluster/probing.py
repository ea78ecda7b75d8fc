"""Whether the tasks of a cluster are up: asked once, or until all are."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent import futures

import grpc

from tfdist._tf.waiting import wait_for
from tfdist.cluster.spec import Cluster

_log = logging.getLogger(__name__)

_POLL_SECS = 0.2
_MEETING = "tfdist.Meeting"


class TaskState(enum.Enum):
    """What a probe found at a task's address."""

    LIVE = "up"
    FROZEN = "connected, but does not answer"
    APART = "up, but has not reached this task"
    DEAD = "not up"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a task answered when it was asked for its status.

    Attributes:
        state: The state of the task.
        identity: Differs between two servers started at one address; None
            without answer.
    """

    state: TaskState
    identity: bytes | None = None


def ask(
    addresses: Sequence[str],
    timeout_secs: float = 3.0,
    method: str = "/tensorflow.WorkerService/GetStatus",
    request: bytes = b"",
) -> list[Answer]:
    """Asks the servers at `addresses` for their status, at once.

    Uses channels of its own, so that no earlier failure to connect is
    remembered.

    Args:
        addresses: `host:port` of each.
        timeout_secs: Seconds after which a server that accepted the
            connection but did not answer counts as frozen.
        method: What is called. Default: a method of TensorFlow's own servers.
        request: What it is called with.

    Returns:
        The answer of each.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as channels:
        calls = []
        for address in addresses:
            channel = grpc.insecure_channel(address, options=options)
            channels.enter_context(channel)
            call = channel.unary_unary(method)
            calls.append(call.future(request, timeout=timeout_secs))
        return [_answer(call) for call in calls]


def _answer(call: grpc.Future) -> Answer:
    try:
        return Answer(TaskState.LIVE, call.result())
    except grpc.RpcError as error:
        frozen = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        return Answer(TaskState.FROZEN if frozen else TaskState.DEAD)


def probe(address: str, timeout_secs: float = 3.0) -> TaskState:
    """The state of the task at `address`; see `ask`."""
    return ask([address], timeout_secs)[0].state


def wait_until_up(
    cluster: Cluster,
    timeout_secs: float,
    give_up: Callable[[], None] = lambda: None,
) -> None:
    """Waits until every worker and ps of `cluster` answers.

    `ParameterServerStrategy` itself would block inside C for many minutes,
    deaf to signals, when a task is missing.

    Args:
        cluster: The cluster; this process is its chief.
        timeout_secs: Seconds to wait.
        give_up: Called again and again meanwhile; ends the wait by raising.

    Raises:
        TimeoutError: Some task was not up in time; the message names each.
    """
    tasks = server_tasks(cluster)
    addresses = [address_of(cluster, task) for task in tasks]

    def states() -> list[TaskState]:
        return [answer.state for answer in ask(addresses)]

    _wait_for_all(cluster, tasks, states, timeout_secs, give_up)


def meet(
    cluster: Cluster,
    timeout_secs: float,
    give_up: Callable[[], None] = lambda: None,
) -> None:
    """Waits until all tasks of an all-reduce job wait for each other.

    TensorFlow would itself wait in C, for ever, name nobody, and take what is
    left of a frozen task for one that is there. So this task listens at its
    own address, and leaves it to TensorFlow when it has both asked and been
    asked by each other one.

    Args:
        cluster: The cluster, without parameter servers; all tasks do this.
        timeout_secs: Seconds to wait.
        give_up: Called again and again meanwhile; ends the wait by raising.

    Raises:
        TimeoutError: Some task was not there in time; the message names each.
        RuntimeError: The own address cannot be listened at.
    """
    own = (cluster.task_type, cluster.task_index)
    others = [task for task in training_tasks(cluster) if task != own]
    addresses = {address_of(cluster, task): task for task in others}
    # A process that was started again is another one: it has to meet again.
    identity = os.urandom(8)
    asked_by: dict[str, bytes] = {}
    answered: dict[str, bytes | None] = {}

    def greet(request: bytes, context: grpc.ServicerContext) -> bytes:
        asked_by[request[8:].decode()] = request[:8]
        return identity

    def met(address: str) -> bool:
        return asked_by.get(address, b"") == answered.get(address)

    def states() -> list[TaskState]:
        waiting = [address for address in addresses if not met(address)]
        request = identity + address_of(cluster, own).encode()
        replies = ask(waiting, method=f"/{_MEETING}/Greet", request=request)
        replied = dict(zip(waiting, replies, strict=True))
        for address, reply in replied.items():
            answered[address] = reply.identity
            if reply.state is TaskState.LIVE and not met(address):
                replied[address] = Answer(TaskState.APART)
        alive = Answer(TaskState.LIVE)
        return [replied.get(address, alive).state for address in addresses]

    methods = {"Greet": grpc.unary_unary_rpc_method_handler(greet)}
    server = grpc.server(
        futures.ThreadPoolExecutor(max_workers=4),
        [grpc.method_handlers_generic_handler(_MEETING, methods)],
        options=[("grpc.so_reuseport", 0)],
    )
    port = address_of(cluster, own).rpartition(":")[2]
    try:
        server.add_insecure_port(f"[::]:{port}")
    except RuntimeError as error:
        raise RuntimeError(
            f"Task {own[0]}:{own[1]} cannot listen at {cluster.address}. "
            f"Is another process using that port? {error}"
        ) from error
    server.start()
    try:
        _wait_for_all(cluster, others, states, timeout_secs, give_up)
    finally:
        # The last one that asks has its answer before the port is left.
        server.stop(grace=5.0).wait()


def _wait_for_all(
    cluster: Cluster,
    tasks: Sequence[tuple[str, int]],
    states: Callable[[], list[TaskState]],
    timeout_secs: float,
    give_up: Callable[[], None],
) -> None:
    """Waits for tasks to be up, and says for whom; see `wait_until_up`."""
    missing: dict[tuple[str, int], TaskState] = {}
    next_message = time.monotonic() + 5.0

    def listed() -> str:
        return ", ".join(
            f"{job}:{index} at {address_of(cluster, (job, index))} "
            f"({state.value})"
            for (job, index), state in missing.items()
        )

    def all_up() -> bool:
        nonlocal missing, next_message
        missing = {
            task: state
            for task, state in zip(tasks, states(), strict=True)
            if state is not TaskState.LIVE
        }
        if missing:
            give_up()
        if missing and time.monotonic() >= next_message:
            _log.warning("Waiting for %s.", listed())
            next_message = time.monotonic() + 10.0
        return not missing

    if not wait_for(all_up, timeout_secs, _POLL_SECS):
        raise TimeoutError(
            f"{len(missing)} task(s) of the cluster did not come up within "
            f"{timeout_secs:g} s: {listed()}. Start them with the same "
            "cluster in TF_CONFIG and check that the addresses are right "
            "and can be reached from here. "
            "RunConfig(session_creation_timeout_secs=...) sets the limit."
        )


def training_tasks(cluster: Cluster) -> list[tuple[str, int]]:
    """`(job, index)` of every training task."""
    return [
        (job, index) for job, tasks in cluster.tasks.items() for index in tasks
    ]


def server_tasks(cluster: Cluster) -> list[tuple[str, int]]:
    """`(job, index)` of every task that runs a server for the chief."""
    return [
        (job, index)
        for job in ("ps", "worker")
        for index in cluster.tasks.get(job, ())
    ]


def address_of(cluster: Cluster, task: tuple[str, int]) -> str:
    """`host:port` of a task."""
    job, index = task
    return cluster.tasks[job][index]
