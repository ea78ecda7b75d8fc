"""The private network and the free ports of a local cluster.

TensorFlow's servers authenticate nobody, listen on every interface and execute
any graph they are sent. A local cluster therefore gets a Linux network
namespace with only a loopback interface, and reserves its ports.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import random
import socket
import struct
from pathlib import Path

_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1

EXPOSED = (
    "TensorFlow's servers authenticate nobody, and whoever can reach this "
    "machine can reach them"
)
"""A warning about clusters in the host's network."""

# Below the ephemeral ports, which Linux assigns to outgoing connections.
_PORTS = range(10000, 32768)

_libc = ctypes.CDLL(None, use_errno=True)


def enter_private_network() -> None:
    """Moves this process and its future children into a private network.

    Needs privileges or unprivileged user namespaces, and must run before the
    process starts a thread. There is no way back, so a child tries it first: a
    system may grant the namespace but refuse to bring up the loopback.

    Raises:
        OSError: The system refuses; this process has not moved.
    """
    refusals = []
    for flags in (_CLONE_NEWNET, _CLONE_NEWUSER | _CLONE_NEWNET):
        refusal = _refusal_in_child(flags)
        if not refusal:
            return _unshare_network(flags)
        refusals.append(os.strerror(refusal))
    raise OSError("; ".join(dict.fromkeys(refusals)))


def _refusal_in_child(flags: int) -> int:
    """The `errno` with which `_unshare_network` fails; 0 if it succeeds."""
    child = os.fork()
    if child == 0:
        status = errno.EINVAL
        try:
            _unshare_network(flags)
            status = 0
        except OSError as error:
            status = error.errno or status
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _unshare_network(flags: int) -> None:
    """Enters the namespaces of `flags` and brings up loopback there."""
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(flags) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
    if flags & _CLONE_NEWUSER:
        # Unprivileged processes may only then write a group map.
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    set_loopback(up=True)


def set_loopback(*, up: bool) -> None:
    """Brings this network's loopback interface up, or takes it down.

    Only for a private network: in the host's, all local services would fail.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        request = struct.pack("16sh22x", b"lo", 0)
        request = fcntl.ioctl(control, _SIOCGIFFLAGS, request)
        name, flags = struct.unpack("16sh22x", request)
        flags = flags | _IFF_UP if up else flags & ~_IFF_UP
        request = struct.pack("16sh22x", name, flags)
        fcntl.ioctl(control, _SIOCSIFFLAGS, request)


def reserve_ports(count: int) -> list[socket.socket]:
    """Binds `count` free ports, so that no other program takes them.

    The sockets, which the caller must close, do not listen. They allow their
    address to be reused, so TensorFlow's servers, which do too, can listen.
    """
    reserved: list[socket.socket] = []
    for port in random.sample(_PORTS, len(_PORTS)):
        if len(reserved) == count:
            break
        with contextlib.suppress(OSError):  # The port is taken.
            reserved.append(_bind(port))
    return reserved


def _bind(port: int) -> socket.socket:
    """Returns a socket bound to `port` on every address of the machine."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    holder = socket.socket(family, socket.SOCK_STREAM)
    try:
        if dual:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        holder.bind(("", port))
    except OSError:
        holder.close()
        raise
    # Not set before `bind`, so that even a lingering connection counts as
    # taken; set from now on, so that the task itself can bind.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder
