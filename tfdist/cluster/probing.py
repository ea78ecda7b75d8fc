"""Whether the tasks of a cluster are up: asked once, or until all are."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import socket
import time
from collections.abc import Callable, Sequence

import grpc

from tfdist._tf.waiting import wait_for
from tfdist.cluster.spec import Cluster

_log = logging.getLogger(__name__)

_POLL_SECS = 0.2


class TaskState(enum.Enum):
    """What a probe found at a task's address."""

    LIVE = "up"
    FROZEN = "connected, but does not answer"
    DEAD = "not up"


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a task answered when it was asked for its status.

    Attributes:
        state: The state of the task.
        identity: Differs between two servers started at one address, for it
            holds the random incarnation of each device; None without answer.
    """

    state: TaskState
    identity: bytes | None = None


def ask(addresses: Sequence[str], timeout_secs: float = 3.0) -> list[Answer]:
    """Asks the TensorFlow servers at `addresses` for their status, at once.

    Calls `GetStatus` of TensorFlow's own worker service on channels of its
    own, so that no earlier failure to connect is remembered.

    Args:
        addresses: `host:port` of each.
        timeout_secs: Seconds after which a server that accepted the
            connection but did not answer counts as frozen.

    Returns:
        The answer of each.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as channels:
        calls = []
        for address in addresses:
            channel = grpc.insecure_channel(address, options=options)
            channels.enter_context(channel)
            get_status = channel.unary_unary(
                "/tensorflow.WorkerService/GetStatus"
            )
            calls.append(get_status.future(b"", timeout=timeout_secs))
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

    def states(addresses: Sequence[str]) -> list[TaskState]:
        return [answer.state for answer in ask(addresses)]

    _wait_for_all(cluster, server_tasks(cluster), states, timeout_secs, give_up)


def meet(
    cluster: Cluster,
    timeout_secs: float,
    give_up: Callable[[], None] = lambda: None,
) -> None:
    """Waits until every other task of an all-reduce job can be connected to.

    Meanwhile this one listens at its own address, and leaves it to TensorFlow,
    which would itself wait in C, for ever, and name nobody.

    Args:
        cluster: The cluster, without parameter servers; all tasks do this.
        timeout_secs: Seconds to wait.
        give_up: Called again and again meanwhile; ends the wait by raising.

    Raises:
        TimeoutError: Some task was not up in time; the message names each.
        RuntimeError: The own address cannot be listened at.
    """
    own = (cluster.task_type, cluster.task_index)
    others = [task for task in training_tasks(cluster) if task != own]
    host, port = _endpoint(address_of(cluster, own))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError as error:
            raise RuntimeError(
                f"Task {own[0]}:{own[1]} cannot listen at {cluster.address}. "
                f"Is another process using that port? {error}"
            ) from error
        listener.listen(len(others))
        _wait_for_all(cluster, others, _listening, timeout_secs, give_up)


def _listening(addresses: Sequence[str]) -> list[TaskState]:
    states = []
    for address in addresses:
        try:
            socket.create_connection(_endpoint(address), timeout=1.0).close()
            states.append(TaskState.LIVE)
        except OSError:
            states.append(TaskState.DEAD)
    return states


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _wait_for_all(
    cluster: Cluster,
    tasks: Sequence[tuple[str, int]],
    states_of: Callable[[Sequence[str]], list[TaskState]],
    timeout_secs: float,
    give_up: Callable[[], None],
) -> None:
    """Waits for tasks to be up, and says for whom; see `wait_until_up`."""
    missing = {task: TaskState.DEAD for task in tasks}
    next_message = time.monotonic() + 5.0

    def listed() -> str:
        return ", ".join(
            f"{job}:{index} at {address_of(cluster, (job, index))} "
            f"({state.value})"
            for (job, index), state in missing.items()
        )

    def all_up() -> bool:
        nonlocal missing, next_message
        states = states_of([address_of(cluster, task) for task in missing])
        missing = {
            task: state
            for task, state in zip(missing, states, strict=True)
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
