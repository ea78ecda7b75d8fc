"""The order in which a device does its work, and how long that takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Work:
    """What a device does without a break: a stage, for one micro-batch.

    Attributes:
        device: Full name of the device.
        replica: Index of the replica.
        stage: Index of the stage.
        micro_batch: Index among the micro-batches of the replica.
        forward: Whether it is the forward pass.
        start: Seconds since the first work of the batch began.
        end: Seconds since then.
    """

    device: str
    replica: int
    stage: int
    micro_batch: int
    forward: bool
    start: float = 0.0
    end: float = 0.0


class DeviceSchedule:
    """Has each device do one work after the other, in the order of `run`.

    Else it would begin all that it can, and the first micro-batch would leave
    the first stage as late as the last one.

    Args:
        timed: Whether to read the clock of the device's machine when a work's
            inputs are there and its device is free, and when its outputs are.

    Attributes:
        work: What was run, without its times.
        times: Start and end of the first, of the second, and so on.
    """

    def __init__(self, timed: bool = False) -> None:
        self._timed = timed
        self._last: dict[str, list[tf.Tensor]] = {}
        self.work: list[Work] = []
        self.times: list[tf.Tensor] = []

    def run(self, work: Work, inputs: Any, compute: Callable[[], Any]) -> Any:
        """Returns `compute()`, on the device, after the work before."""
        self.work.append(work)
        with tf.device(work.device):
            with tf.control_dependencies(self._last.get(work.device, [])):
                start = self._clock(inputs)
                with tf.control_dependencies(start):
                    outputs = compute()
            self._last[work.device] = _tensors(outputs) + self._clock(outputs)
        return outputs

    def _clock(self, needed: Any) -> list[tf.Tensor]:
        """The time when all of `needed` is there, if it is asked for."""
        if not self._timed:
            return []
        with tf.control_dependencies(_tensors(needed)):
            self.times.append(tf.timestamp())
        return self.times[-1:]


def _tensors(structure: Any) -> list[tf.Tensor]:
    flat = tf.nest.flatten(structure, expand_composites=True)
    return [t for t in flat if t is not None]
