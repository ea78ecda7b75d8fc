"""Cuts this process's connections to tasks that freeze.

A call to a frozen server waits forever. Once its connection is closed, the call
fails as a call to a dead server does. If the call holds Python's GIL (as when
TensorFlow sends a traced function to every task), no thread of this process can
close the connection. A second process, the sentinel, therefore holds the
connections too. It runs this file, which imports only the standard library.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pathlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence

_log = logging.getLogger(__name__)

_SILENCE_SECS = 3.0  # After this silence the sentinel probes the tasks itself.
_PROBE_SECS = 3.0
_MOST_CONNECTIONS = 100


def connections(
    addresses: Iterable[str],
) -> Iterator[tuple[str, socket.socket]]:
    """Yields this process's TCP connections to tasks; closes each after use."""
    tasks = {peer: a for a in addresses for peer in _peers(a)}
    for path in pathlib.Path("/proc/self/fd").glob("*"):
        with contextlib.suppress(OSError):  # Closed since, or not connected.
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as connection:
                peer = connection.getpeername()[:2]
                if peer in tasks:
                    yield tasks[peer], connection


def _peers(address: str) -> set[tuple[str, int]]:
    """Returns a task's IP addresses and port in the form of `getpeername`."""
    host, port = _endpoint(address)
    try:
        infos = socket.getaddrinfo(host, port)
    except OSError:
        return set()
    ips = {str(info[4][0]) for info in infos}
    ips |= {f"::ffff:{ip}" for ip in ips if ":" not in ip}
    return {(ip, port) for ip in ips}


def _endpoint(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def cut_connections(address: str) -> int:
    """Closes this process's connections to `host:port`; returns how many."""
    cut = 0
    for _, connection in connections([address]):
        _shut_down(connection)
        cut += 1
    return cut


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The other side has closed it.
        connection.shutdown(socket.SHUT_RDWR)


class Sentinel:
    """A process that cuts connections to frozen tasks when this one cannot.

    A task is frozen after `frozen_secs` without a sign of life. The sentinel
    exits when this process does, however this process ends.
    """

    def __init__(self, frozen_secs: float) -> None:
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        with theirs:
            self._process: subprocess.Popen | None = subprocess.Popen(
                [sys.executable, "-ISu", __file__, str(frozen_secs)],
                stdin=theirs.fileno(),
                start_new_session=True,
            )

    def tell(self, addresses: Sequence[str]) -> None:
        """Hands over the connections to tasks; call it every second."""
        if self._process is None:
            return
        held: dict[str, list[int]] = {address: [] for address in addresses}
        for address, connection in connections(addresses):
            # Not `socket.dup`, which would make gRPC's sockets blocking.
            held[address].append(os.dup(connection.fileno()))
        try:
            for address, fds in held.items():
                name, few = [address.encode()], fds[:_MOST_CONNECTIONS]
                with contextlib.suppress(BlockingIOError):  # Sentinel is busy.
                    socket.send_fds(self._channel, name, few)
        except OSError:
            _log.warning(
                "The process that watches over this one has ended: a task that "
                "freezes may from now on hold up the job until it wakes up."
            )
            self.close()
        finally:
            for fd in itertools.chain.from_iterable(held.values()):
                os.close(fd)

    def close(self) -> None:
        """Ends the sentinel process."""
        if self._process is not None:
            self._channel.close()
            self._process.wait()
            self._process = None


def _watch(channel: socket.socket, frozen_secs: float) -> None:
    """Runs the sentinel until the process that started it has ended."""
    held: dict[str, list[socket.socket]] = {}
    silent_since: dict[str, float] = {}
    channel.settimeout(_SILENCE_SECS)
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(
                channel, 1024, _MOST_CONNECTIONS
            )
        except TimeoutError:
            for address, sockets in held.items():
                if not _is_silent(address):
                    silent_since.pop(address, None)
                    continue
                since = silent_since.setdefault(address, time.monotonic())
                if time.monotonic() - since >= frozen_secs:
                    for connection in sockets:
                        _shut_down(connection)
            continue
        if not message:
            return
        address = message.decode()
        for connection in held.get(address, ()):
            connection.close()
        held[address] = [socket.socket(fileno=fd) for fd in fds]
        silent_since.clear()


def _is_silent(address: str) -> bool:
    """Whether a server accepts a connection but sends nothing.

    A healthy gRPC server sends its settings before it receives a request.
    """
    try:
        endpoint = _endpoint(address)
        with socket.create_connection(endpoint, _PROBE_SECS) as connection:
            connection.recv(1)
    except OSError as error:  # If nothing listens, calls fail by themselves.
        return isinstance(error, TimeoutError)
    return False


if __name__ == "__main__":
    _watch(socket.socket(fileno=os.dup(0)), float(sys.argv[1]))
