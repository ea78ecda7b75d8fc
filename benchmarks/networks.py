"""Processes in separate networks, connected by a switch that delays packets.

Each process has a network namespace with a TUN device, whose address is
10.77.0.K. The switch, `switch.c`, reads and writes all devices. Packets are
segmented for an MTU of 1500, but travel in units of up to 64 kB and without
checksums, as with a network card that offloads both, to save CPU time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import IO, Any, Self

from benchmarks.commands import ROOT, RunError
from tfdist.launch import network
from tfdist.launch.processes import die_with_parent

_TUN = "/dev/net/tun"
_DEVICE = b"tun0"
_MTU = 1500
# From linux/if_tun.h and linux/sockios.h.
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x1, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x1, 0x2
_SIOCSIFADDR, _SIOCSIFNETMASK = 0x8916, 0x891C
_SIOCSIFMTU, _SIOCSIFFLAGS = 0x8922, 0x8914
_IFF_UP = 0x1

# It sends as the usual Cubic does where nothing is lost, and any namespace may
# choose it; the machine's own could be BBR, which holds packets back.
_CONGESTION_CONTROL = "reno"


def address(number: int) -> str:
    """Of the process that was started as the `number`-th, from 0."""
    return f"10.77.0.{number + 1}"


def compile_switch(directory: str) -> str:
    """Makes the switch in `directory`; returns its path."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        sys.exit("There is no C compiler, `cc` or `gcc`, for the switch.")
    source = pathlib.Path(__file__).with_name("switch.c")
    program = f"{directory}/switch"
    subprocess.run([compiler, "-O2", "-o", program, source], check=True)
    return program


def enter() -> None:
    """Makes this process one that may start others in networks of their own.

    It has no network from then on. Ends it where the system refuses.
    """
    try:
        network.enter_private_network()
        os.close(_open_device(address(0)))
    except OSError as error:
        sys.exit(f"The system refuses networks with {_TUN}: {error}.")


class Networks:
    """Starts processes in networks of their own, and ends them all.

    Args:
        switch: What `compile_switch` has returned.
        delay_ms: How long each packet is on its way.
        mbit: What each process sends and receives per second at most, each;
            0 for no limit.

    Attributes:
        switch_pid: Of the switch, once it is there.
        late_us: By how much packets came late, on average; after the block.
        real_time: Whether the switch goes before all other processes.
    """

    def __init__(self, switch: str, delay_ms: float, mbit: float = 0.0) -> None:
        self._command = [
            switch,
            str(round(delay_ms * 1e6)),
            str(8e3 / mbit if mbit else 0),
        ]
        self._devices: list[int] = []
        self._tasks: list[subprocess.Popen[bytes]] = []
        self._switch: subprocess.Popen[str] | None = None
        self.late_us = 0.0
        self.real_time = False

    def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdout: int | IO[bytes] = subprocess.PIPE,
    ) -> subprocess.Popen[bytes]:
        """Starts a process in the next network, from the main thread."""
        where, parent = address(len(self._tasks)), os.getpid()
        ours, theirs = socket.socketpair()

        def enter_network() -> None:
            network.enter_private_network()
            die_with_parent(parent)
            socket.send_fds(theirs, [b"\0"], [_open_device(where)])

        with ours, theirs:
            task = subprocess.Popen(
                command,
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # So that its own children go with it.
                preexec_fn=enter_network,
            )
            self._tasks.append(task)
            self._devices += socket.recv_fds(ours, 1, 1)[1]
        return task

    def join(self) -> None:
        """Starts the switch between the networks that there are."""
        self._switch = subprocess.Popen(
            [*self._command, *map(str, self._devices)],
            pass_fds=self._devices,
            stdin=subprocess.PIPE,  # It ends with it, and so with us.
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is ours.
        )
        # On a busy machine it would wait for its turn longer than the delay.
        with contextlib.suppress(PermissionError):
            first = os.sched_param(1)
            os.sched_setscheduler(self._switch.pid, os.SCHED_FIFO, first)
            self.real_time = True

    @property
    def switch_pid(self) -> int:
        """Its process id."""
        assert self._switch is not None
        return self._switch.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        for task in self._tasks:
            if task.poll() is None:
                os.killpg(task.pid, signal.SIGKILL)
            task.wait()
        if self._switch is not None:
            counted = self._switch.communicate()[0]
            if counted:
                self.late_us = int(counted.split()[2]) / 1e3
        for device in self._devices:
            os.close(device)


def round_trip_ms(switch: str, delay_ms: float, mbit: float = 0.0) -> float:
    """What a byte takes there and back by TCP, the median of some."""
    module = [sys.executable, "-m", "benchmarks.round_trip"]
    with Networks(switch, delay_ms, mbit) as networks:
        networks.start([*module, "answer", address(0)], cwd=ROOT)
        asking = networks.start([*module, "ask", address(0)], cwd=ROOT)
        networks.join()
        said: bytes = asking.communicate(timeout=60)[0]
        if asking.returncode:
            raise RunError(said.decode())
        return float(said)


def _open_device(where: str) -> int:
    """Makes the device of this process's network; returns its descriptor."""
    device = os.open(_TUN, os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", _DEVICE, flags))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    path = pathlib.Path("/proc/sys/net/ipv4/tcp_congestion_control")
    path.write_text(_CONGESTION_CONTROL)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:

        def configure(what: int, packed: bytes) -> None:
            request = struct.pack("16s24s", _DEVICE, packed)
            fcntl.ioctl(control, what, request)

        def internet(address: str) -> bytes:
            family = struct.pack("HH", socket.AF_INET, 0)
            return family + socket.inet_aton(address)

        configure(_SIOCSIFADDR, internet(where))
        configure(_SIOCSIFNETMASK, internet("255.255.255.0"))
        configure(_SIOCSIFMTU, struct.pack("i", _MTU))
        configure(_SIOCSIFFLAGS, struct.pack("H", _IFF_UP))
    return device
