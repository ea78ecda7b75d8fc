"""Probes whether the tasks of a cluster are up, once or until all are."""

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
"""The jobs whose tasks run a server for the chief."""

WAITING = b"waiting"
"""The answer of a task that is waiting for the rest of an all-reduce job."""

_POLL_SECS = 0.2
_PROXIES = {"grpc", "https", "http"}  # `<name>_proxy` variables gRPC reads.


class TaskState(enum.Enum):
    """The state of a task, as found by a probe of its address."""

    LIVE = "up"
    FROZEN = "connected, but does not answer"
    APART = "up, but has not reached this task"
    DEAD = "not up"


class Answer(NamedTuple):
    """The result of asking a task for its status."""

    state: TaskState
    identity: bytes | None = None  # The response, which differs per server.


def ask(
    addresses: Sequence[str],
    timeout_secs: float = 3.0,
    method: str = "/tensorflow.WorkerService/GetStatus",
    request: bytes = b"",
) -> list[Answer]:
    """Asks the servers at `addresses` for their status, all at once.

    Uses new channels, so that no earlier failure to connect delays a call. A
    server that accepts the connection but does not answer in time is frozen.
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

    If one is missing, `ParameterServerStrategy` itself would block in C for
    minutes and ignore signals. `give_up`, called meanwhile, may raise.

    Raises:
        TimeoutError: Some tasks were not up in time; the message names them.
    """
    tasks = cluster.addresses(*SERVER_JOBS)

    def states() -> list[TaskState]:
        # One that waits for an all-reduce job has another cluster.
        return [
            TaskState.APART if each.identity == WAITING else each.state
            for each in ask(list(tasks.values()))
        ]

    wait_for_all(tasks, states, timeout_secs, give_up)


def wait_for_all(
    tasks: Mapping[str, str],
    states: Callable[[], Sequence[TaskState]],
    timeout_secs: float,
    give_up: Callable[[], None] = lambda: None,
) -> None:
    """Like `wait_until_up`, for `tasks` (name to address) with `states`."""
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
