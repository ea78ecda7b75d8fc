"""Whether the tasks of a cluster are up: asked once, or until all are."""

from __future__ import annotations

import contextlib
import enum
import logging
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import grpc

from tfdist._tf.waiting import wait_for
from tfdist.cluster.spec import Cluster

_log = logging.getLogger(__name__)

SERVER_JOBS = ("ps", "worker")
"""Those whose tasks run a server for the chief."""

WAITING = b"waiting"
"""What a task answers that waits for the others of an all-reduce job."""

_POLL_SECS = 0.2
_PROXIES = {"grpc", "https", "http"}  # Where gRPC looks for one.


class TaskState(enum.Enum):
    """What a probe found at a task's address."""

    LIVE = "up"
    FROZEN = "connected, but does not answer"
    APART = "up, but has not reached this task"
    DEAD = "not up"


class Answer(NamedTuple):
    """What is known of a task that was asked for its status."""

    state: TaskState
    identity: bytes | None = None  # Its answer; each server has its own.


def ask(
    addresses: Sequence[str],
    timeout_secs: float = 3.0,
    method: str = "/tensorflow.WorkerService/GetStatus",
    request: bytes = b"",
) -> list[Answer]:
    """Asks the servers at `addresses` for their status, all at once.

    On new channels: no earlier failure to connect is remembered. A server that
    has accepted the connection, but does not answer in time, is frozen.
    """
    options = [("grpc.use_local_subchannel_pool", 1)]
    with contextlib.ExitStack() as channels:
        calls = []
        for address in addresses:
            channel = channels.enter_context(
                grpc.insecure_channel(address, options=options)
            )
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

    When one is missing, `ParameterServerStrategy` itself would block inside C
    for minutes, deaf to signals. `give_up`, called meanwhile, may raise.

    Raises:
        TimeoutError: Some task was not up in time; the message names each.
    """
    tasks = cluster.addresses(*SERVER_JOBS)

    def states() -> list[TaskState]:
        return [answer.state for answer in ask(list(tasks.values()))]

    wait_for_all(tasks, states, timeout_secs, give_up)


def wait_for_all(
    tasks: Mapping[str, str],
    states: Callable[[], Sequence[TaskState]],
    timeout_secs: float,
    give_up: Callable[[], None] = lambda: None,
) -> None:
    """Waits, as `wait_until_up`, for `tasks` (name to address) by `states`."""
    missing = ""
    next_message = time.monotonic() + 5.0

    def all_up() -> bool:
        nonlocal missing, next_message
        found = zip(tasks.items(), states(), strict=True)
        missing = ", ".join(
            f"{name} at {address} ({state.value})"
            for (name, address), state in found
            if state is not TaskState.LIVE
        )
        if not missing:
            return True
        give_up()
        if time.monotonic() >= next_message:
            _log.warning("Waiting for %s.", missing)
            next_message = time.monotonic() + 10.0
        return False

    if not wait_for(all_up, timeout_secs, _POLL_SECS):
        proxies = _PROXIES & urllib.request.getproxies().keys()
        direct = "".join(f" past {name}_proxy" for name in sorted(proxies))
        raise TimeoutError(
            f"{missing.count(' at ')} task(s) of the cluster did not come up "
            f"within {timeout_secs:g} s: {missing}. Start them with the same "
            "cluster in TF_CONFIG and check that the addresses are right "
            f"and can be reached from here{direct}. "
            "RunConfig(session_creation_timeout_secs=...) sets the limit, of "
            "a tf.data service one_pass(start_timeout_secs=...)."
        )
