"""Upper limits for any implementation, measured on the same machine."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from concurrent import futures

import grpc
import numpy as np

_METHOD = "/limits/Echo"


def copies_per_second(num_bytes: int, secs: float) -> float:
    """How often so many bytes are copied in memory, by one core."""
    source = np.zeros(num_bytes, np.uint8)
    target = np.ones(num_bytes, np.uint8)
    return _rate(lambda: np.copyto(target, source), secs)


def echoes_per_second(secs: float) -> float:
    """How often gRPC carries a byte to another process and back."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.limits"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as server:
        try:
            port = int(server.stdout.readline())
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                call = channel.unary_unary(_METHOD)
                call(b"x", wait_for_ready=True, timeout=30)
                return _rate(lambda: call(b"x"), secs)
        finally:
            server.stdin.close()  # Which ends it.


def _rate(call: Callable[[], object], secs: float) -> float:
    number, start = 0, time.monotonic()
    while (now := time.monotonic()) < start + secs:
        call()
        number += 1
    return number / (now - start)


def _serve() -> None:
    handler = grpc.method_handlers_generic_handler(
        "limits",
        {"Echo": grpc.unary_unary_rpc_method_handler(lambda x, _: x)},
    )
    server = grpc.server(futures.ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((handler,))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(None)


if __name__ == "__main__":
    _serve()
