"""Rejects updates of dispatches that were given up as lost.

A worker that freezes in mid-step and wakes up minutes later resumes its
dispatch, although others have done its steps: `global_step` would exceed its
limit. Each dispatch therefore belongs to a generation; each server knows the
current one, and gradients of any other raise an error there. The chief starts a
new generation when a dispatch was lost, before it schedules the missing steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import tensorflow as tf


class Generations:
    """The current generation, stored on the device of each parameter server."""

    def __init__(self, devices: Sequence[str]) -> None:
        self.current = 0
        self._on: dict[str, tf.Variable] = {}
        for device in devices:
            with tf.device(device):
                own = tf.Variable(0.0, trainable=False, name="generation")
            self._on[device] = own
        self.variables = list(self._on.values())

    def fence(self, generation: tf.Tensor) -> Fence:
        """The fence that updates of a dispatch of `generation` must pass."""
        return Fence(generation, self._on)

    def read(self) -> tf.Tensor:
        """The current generation; in a function, at the time of its call."""
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
        """Returns a 1-D `message` if its generation is current on `device`.

        Otherwise it fails: "Expected size[0] in ..., but got -2". TensorFlow
        runs all `tf.debugging.Assert` of a function in order, so with these a
        server would wait for other servers, and a step for the one before.
        """
        with tf.device(device):
            current = tf.equal(self.variables[device], generation)
            return tf.slice(message, [0], [tf.where(current, -1, -2)])
