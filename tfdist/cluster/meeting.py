"""Rendezvous of an all-reduce job: its processes agree which of them train.

TensorFlow itself would wait in C forever without naming missing tasks, and take
a frozen task for a live one. Each task therefore listens at its own address,
and leaves it to TensorFlow once every other task has both asked and answered.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import grpc
import tensorflow as tf

from tfdist.cluster.probing import (
    WAITING,
    Answer,
    TaskState,
    ask,
    wait_for_all,
)
from tfdist.cluster.servers import starting
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.spec import Cluster

_MEETING = "tfdist.Meeting"
_GATHER_SECS = 15.0  # For the chosen tasks, which were up a moment ago.


def meet(
    cluster: Cluster,
    timeout_secs: float,
    give_up: Callable[[], None] = lambda: None,
    size: ClusterSize | None = None,
) -> Cluster:
    """Waits until all tasks of an all-reduce job have found each other.

    If a file sets the `size`, the leader decides which tasks take part, as in
    torchrun's rendezvous: all wanted tasks, or those that are up
    `last_call_timeout` seconds after the minimum is. The others keep waiting.

    Other arguments and errors are those of `probing.wait_until_up`, and
    `UnavailableError` if a task that was to take part is gone, and, if no file
    sets the size, `ValueError` if a task was started with another cluster.

    Returns:
        The training tasks that take part, with workers numbered from 0.
    """
    others = cluster.addresses()
    own = others.pop(cluster.task)
    wait = functools.partial(wait_for_all, give_up=give_up)
    tasks = json.dumps(cluster.addresses(), sort_keys=True)
    if size is not None and size.may_change:
        tasks = ""
    meeting = _Meeting(own, timeout_secs, wait, tasks.encode())
    with meeting.listening(cluster):
        if size is None or not size.may_change:
            wait(others, lambda: meeting.states(others), timeout_secs)
            return cluster
        if cluster.is_chief:
            meeting.decide(size)
        else:
            meeting.wait_for_decision(cluster)
        others = {n: a for n, a in others.items() if a in meeting.members}
        secs = min(timeout_secs, _GATHER_SECS)
        try:
            wait(others, lambda: meeting.states(others), secs)
        except TimeoutError as error:
            raise tf.errors.UnavailableError(None, None, str(error)) from None
    jobs = {
        job: [a for a in tasks.values() if a in meeting.members]
        for job, tasks in cluster.tasks.items()
    }
    index = jobs[cluster.task_type].index(own)
    return Cluster.from_jobs(jobs, cluster.task_type, index)


class _NotThere(grpc.GenericRpcHandler):
    """Answers calls meant for this process's predecessor: it is gone."""

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler:
        def refuse(_: bytes, context: grpc.ServicerContext) -> None:
            unavailable = grpc.StatusCode.UNAVAILABLE
            context.abort(unavailable, "This process was started again")

        return grpc.unary_unary_rpc_method_handler(refuse)


class _Meeting:
    """The tasks that this task waits for and that wait for this task."""

    def __init__(
        self,
        own: str,
        timeout_secs: float,
        wait: Callable[..., Any],
        tasks: bytes = b"",
    ) -> None:
        self.members: list[str] = []  # Addresses of the tasks that take part.
        self._own, self._timeout_secs, self._wait = own, timeout_secs, wait
        # Tells a restarted process, which has to meet again, from the old one.
        self._identity = os.urandom(8)
        self._tasks = tasks  # Must be the same in every task, unless empty.
        self._other_tasks: dict[str, bytes] = {}
        self._asked_by: dict[str, bytes] = {}
        self._answers: dict[str, Answer] = {}
        self._ahead: set[str] = set()  # Have met this task, and left.
        self._decision = b""  # Of the leader, which sends it in its answers.

    @contextlib.contextmanager
    def listening(self, cluster: Cluster) -> Iterator[None]:
        """Answers other tasks, including a group that is already training."""
        greet = grpc.unary_unary_rpc_method_handler(self._greet)
        status = grpc.unary_unary_rpc_method_handler(lambda *_: WAITING)
        handler = grpc.method_handlers_generic_handler
        server = grpc.server(
            futures.ThreadPoolExecutor(max_workers=4),
            [
                handler(_MEETING, {"Greet": greet}),
                handler("tensorflow.WorkerService", {"GetStatus": status}),
                _NotThere(),
            ],
            options=[("grpc.so_reuseport", 0)],
        )
        with starting(cluster):
            server.add_insecure_port(f"[::]:{self._own.rpartition(':')[2]}")
        server.start()
        try:
            yield
        finally:
            # Answers the last request before the port is released.
            server.stop(grace=5.0).wait()

    def _greet(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        decision = self._decision
        address, _, tasks = request[8:].partition(b" ")
        self._asked_by[address.decode()] = request[:8] + decision
        if tasks and self._tasks and tasks != self._tasks:
            self._other_tasks[address.decode()] = tasks
        return self._identity + decision

    def states(self, tasks: Mapping[str, str]) -> list[TaskState]:
        """Asks the tasks not met yet; returns the state of all `tasks`."""
        addresses = tasks.values()
        waiting = [a for a in addresses if self._state(a) is not TaskState.LIVE]
        request = self._identity + self._own.encode() + b" " + self._tasks
        replies = ask(waiting, method=f"/{_MEETING}/Greet", request=request)
        self._answers.update(zip(waiting, replies, strict=True))
        for name, address in tasks.items():
            if other := self._other_tasks.get(address):
                raise ValueError(
                    f"{name} was started with another cluster: "
                    f"{other.decode()}, not {self._tasks.decode()} as this "
                    "task. Give all tasks the same one in TF_CONFIG."
                )
        silent = [
            address
            for address in waiting
            if address in self._asked_by
            and self._state(address) is TaskState.DEAD
        ]
        # TensorFlow answers for one that has left. The answer by which this
        # task would have met it was late, on a busy machine.
        for address, answer in zip(silent, ask(silent), strict=True):
            if answer.state is TaskState.LIVE and answer.identity != WAITING:
                self._ahead.add(address)
        return [self._state(address) for address in addresses]

    def _state(self, address: str) -> TaskState:
        if address in self._ahead:
            return TaskState.LIVE
        answer = self._answers.get(address, Answer(TaskState.DEAD))
        if answer.state is not TaskState.LIVE:
            return answer.state
        identity = (answer.identity or b"")[:8]
        met = self._asked_by.get(address) == identity + self._decision
        return TaskState.LIVE if met else TaskState.APART

    def decide(self, size: ClusterSize) -> None:
        """Waits, as leader, for the wanted tasks; publishes those that came."""
        tasks = size.asked.addresses()
        del tasks[size.cluster.task]
        # A leader that is a worker counts towards the minimum.
        least = size.least - (size.cluster.task_type == "worker")
        since = 0.0

        def enough() -> list[TaskState]:
            nonlocal since
            states = self.states(tasks)
            if states.count(TaskState.LIVE) < least:
                since = 0.0
                return states
            since = since or time.monotonic()
            over = time.monotonic() - since > size.last_call_timeout
            return [TaskState.LIVE] * len(tasks) if over else states

        self._wait(tasks, enough, self._timeout_secs)
        live = TaskState.LIVE
        there = [a for a in tasks.values() if self._state(a) is live]
        self.members = [self._own, *there]
        # Each task now has to ask again, and receives the decision.
        self._decision = json.dumps(self.members).encode()

    def wait_for_decision(self, cluster: Cluster) -> None:
        """Waits, unless leader, until the leader includes this task."""
        name, address = next(iter(cluster.addresses().items()))
        leader = {name: address}

        def told() -> list[TaskState]:
            (state,) = self.states(leader)
            answer = self._answers[address].identity or b""
            self.members = json.loads(answer[8:] or "[]")
            if self._own in self.members:
                return [state]
            self._answers.clear()  # Ask the leader again.
            return [TaskState.APART if state is TaskState.LIVE else state]

        self._wait(leader, told, self._timeout_secs)
