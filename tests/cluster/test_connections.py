"""Connections to a frozen task, cut by this process and by the sentinel."""

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
import time

import pytest

from tfdist._tf.waiting import wait_for
from tfdist.cluster.connections import Sentinel, connections, cut_connections

pytestmark = [
    # Faults at times of their own, which a busy machine would shift.
    pytest.mark.alone,
]

# Speaks first, as a gRPC server does.
TASK = """
import socket
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
held = []
while True:
    held.append(server.accept()[0])
    held[-1].sendall(b"!")
"""
DEADLINE_SECS = 40


@pytest.fixture
def task():
    command = [sys.executable, "-ISu", "-c", TASK]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        process.address = f"127.0.0.1:{int(process.stdout.readline())}"
        yield process
        process.kill()


@pytest.fixture
def connection(task):
    host, port = task.address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        assert connection.recv(1) == b"!"
        yield connection


@pytest.fixture
def sentinel():
    sentinel = Sentinel(frozen_secs=1.0)
    pid = sentinel._process.pid
    yield sentinel
    sentinel.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def recv_with_pythons_lock(connection, secs):
    """As TensorFlow waits while it sends a function; -1 after `secs`."""
    connection.setblocking(True)
    timeout = struct.pack("ll", secs, 0)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    return ctypes.PyDLL(None).recv(
        connection.fileno(), ctypes.create_string_buffer(1), 1, 0
    )


def test_the_connections_of_a_task_are_found_and_cut(task, connection):
    with connection.dup() as another:
        ports = {c.getsockname()[1] for _, c in connections([task.address])}
        assert ports == {another.getsockname()[1]}
    assert cut_connections(task.address) == 1
    assert connection.recv(1) == b""
    assert cut_connections("127.0.0.1:1") == 0


@pytest.mark.slow
def test_sentinel_cuts_while_python_stands_still(task, connection, sentinel):
    task.send_signal(signal.SIGSTOP)
    sentinel.tell([task.address])
    start = time.monotonic()
    assert recv_with_pythons_lock(connection, DEADLINE_SECS) == 0
    assert time.monotonic() - start < DEADLINE_SECS / 2


@pytest.mark.slow
def test_sentinel_leaves_a_task_alone_that_answers(task, connection, sentinel):
    sentinel.tell([task.address])
    assert recv_with_pythons_lock(connection, 10) == -1
    assert cut_connections(task.address) == 1


def test_sockets_stay_as_they_are(task, connection, sentinel):
    """gRPC's threads would hang in a socket that blocks."""
    connection.setblocking(False)
    sentinel.tell([task.address])
    assert cut_connections(task.address) == 1
    assert not os.get_blocking(connection.fileno())


def test_sentinel_that_was_killed(task, sentinel, caplog):
    sentinel._process.kill()
    sentinel._process.wait()
    for _ in range(2):
        sentinel.tell([task.address])
    assert caplog.text.count("watches over this one has ended") == 1


def test_sentinel_that_is_busy_holds_up_nobody(task, connection, sentinel):
    sentinel._process.send_signal(signal.SIGSTOP)
    for _ in range(500):  # More than its channel holds.
        sentinel.tell([task.address])
    sentinel._process.send_signal(signal.SIGCONT)


def test_sentinel_ends_with_its_process(task):
    program = (
        "import os, signal; from tfdist.cluster.connections import Sentinel\n"
        "print(Sentinel(1.0)._process.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=120
    )
    assert done.returncode == -signal.SIGKILL
    process = f"/proc/{int(done.stdout)}"
    assert wait_for(lambda: not os.path.exists(process), DEADLINE_SECS)
