"""Measures the TCP round-trip time of one byte to another network.

    python -m benchmarks.round_trip answer ADDRESS
    python -m benchmarks.round_trip ask ADDRESS

The first answers at an address; the second prints a median in milliseconds.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import sys
import time

_PORT, _TIMES, _DEADLINE_SECS = 2222, 100, 30.0


def answer(address: str) -> None:
    """Sends each byte of one connection back."""
    with socket.create_server((address, _PORT)) as server:
        connection, _ = server.accept()
        _send_at_once(connection)
        while data := connection.recv(1):
            connection.sendall(data)


def ask(address: str) -> float:
    """The median of some round trips, in milliseconds."""
    with _connect(address) as connection:
        _send_at_once(connection)
        times = []
        for _ in range(_TIMES):
            start = time.perf_counter()
            connection.sendall(b"\0")
            connection.recv(1)
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + _DEADLINE_SECS
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # It does not listen yet.
            return socket.create_connection((address, _PORT), timeout=5.0)
        time.sleep(0.05)
    raise TimeoutError(f"Nobody answers at {address}.")


def _send_at_once(connection: socket.socket) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def main() -> None:
    """Answers, or asks and prints."""
    if sys.argv[1] == "answer":
        answer(sys.argv[2])
    else:
        print(ask(sys.argv[2]))


if __name__ == "__main__":
    main()
