"""Keeps updates out that nobody waits for any more.

A worker that froze in mid-step and wakes up minutes later goes on with its
dispatch, whose steps were long done by others: `global_step` would pass its
limit. So each dispatch belongs to a generation, each server knows the current
one, and gradients of another are an error there. The chief starts a new one
whenever a dispatch was lost, before it makes up for its steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf


class Generations:
    """The current generation, known on the device of each parameter server."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.current = 0
        self._on: dict[str, tf.Variable] = {}
        for device in devices:
            with tf.device(device):
                own = tf.Variable(0.0, trainable=False, name="generation")
            self._on[device] = own
        self.variables = list(self._on.values())

    def fence(self, generation: tf.Tensor) -> Fence:
        """What the updates of a dispatch of `generation` must pass."""
        return Fence(generation, self._on)

    def read(self) -> tf.Tensor:
        """The current generation; in a function, that of when it is called."""
        return self.variables[0].read_value()

    def advance(self) -> None:
        """Starts a new generation on every server."""
        self.current += 1
        for variable in self.variables:
            variable.assign(float(self.current))


@dataclasses.dataclass(frozen=True)
class Fence:
    """Lets the updates of one generation pass."""

    generation: tf.Tensor  # That of the dispatch, a scalar float32.
    variables: Mapping[str, tf.Variable]  # For each server, the current one.

    def passed(
        self, device: str, generation: tf.Tensor, message: tf.Tensor
    ) -> tf.Tensor:
        """A 1-D `message` as it is, if its generation is current on `device`.

        Else "Expected size[0] in ..., but got -2". No `tf.debugging.Assert`:
        TensorFlow runs a function's asserts one after the other, so a server
        would wait for the other servers, and a step for the one before.
        """
        with tf.device(device):
            current = tf.equal(self.variables[device], generation)
            return tf.slice(message, [0], [tf.where(current, -1, -2)])
