"""Updates applied where the variable lives (design decision D2).

A worker pushes gradients; the optimizer's arithmetic runs on the parameter
server that holds the variable and its slots, as it did in TF1. Keras' own
`Optimizer.apply` would run it in the caller, and count `iterations` by reading,
adding and writing, which loses steps as soon as two workers do it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

Gradient = tf.Tensor | tf.IndexedSlices | None


def build(
    optimizer: keras.optimizers.Optimizer, variables: Sequence[keras.Variable]
) -> None:
    """Creates the slots of `variables`, each beside its variable.

    Must run inside the strategy's scope; else Keras would create the slots at
    the first step, on the chief.
    """
    if not optimizer.built:
        optimizer.build(list(variables))


def apply_gradients(
    optimizer: keras.optimizers.Optimizer,
    gradients: Sequence[Gradient],
    variables: Sequence[keras.Variable],
) -> None:
    """Updates `variables` and counts the iteration.

    Args:
        optimizer: A built Keras optimizer.
        gradients: One per variable: tensor, `tf.IndexedSlices` or `None`.
        variables: The trainable variables.

    Raises:
        ValueError: There is no gradient for any variable, or the optimizer
            accumulates gradients, which has no meaning when several workers
            share one accumulator.
    """
    if isinstance(optimizer, MultiOptimizer):
        for part, pairs in optimizer.split(gradients, variables):
            apply_gradients(part, *zip(*pairs, strict=True))
        optimizer.iterations.value.assign_add(1)
        return
    _check(optimizer)
    pairs = [
        (g, v)
        for g, v in zip(gradients, variables, strict=True)
        if g is not None
    ]
    if not pairs:
        raise ValueError(
            "The loss depends on no trainable variable: every gradient is "
            f"None. Variables: {[v.path for v in variables]}."
        )
    clipped = clip(optimizer, [g for g, _ in pairs])
    learning_rate = tf.convert_to_tensor(optimizer.learning_rate)
    for gradient, (_, variable) in zip(clipped, pairs, strict=True):
        with tf.device(variable.value.device):
            optimizer.update_step(gradient, variable, learning_rate)
    optimizer.iterations.value.assign_add(1)


def _check(optimizer: keras.optimizers.Optimizer) -> None:
    unsupported = {
        "gradient_accumulation_steps": optimizer.gradient_accumulation_steps,
        "use_ema": optimizer.use_ema,
        "weight_decay": optimizer.weight_decay,
        "loss scaling": isinstance(
            optimizer, keras.optimizers.LossScaleOptimizer
        ),
    }
    used = [name for name, value in unsupported.items() if value]
    if used:
        raise ValueError(
            f"Optimizer {optimizer.name!r} uses {', '.join(used)}, which "
            "updates on parameter servers do not support yet."
        )


def clip(
    optimizer: keras.optimizers.Optimizer, gradients: list[Gradient]
) -> list[Gradient]:
    """Clips as the optimizer's `clipnorm`, `clipvalue`, `global_clipnorm` say.

    Runs on the worker, which holds all gradients: only their clipped values
    travel.
    """
    if optimizer.clipnorm:
        return [tf.clip_by_norm(g, optimizer.clipnorm) for g in gradients]
    if optimizer.global_clipnorm:
        return tf.clip_by_global_norm(gradients, optimizer.global_clipnorm)[0]
    if optimizer.clipvalue:
        limit = optimizer.clipvalue
        return [
            _map(lambda v: tf.clip_by_value(v, -limit, limit), g)
            for g in gradients
        ]
    return gradients


def _map(fn: Callable[[tf.Tensor], tf.Tensor], gradient: Gradient) -> Gradient:
    """Applies `fn` to the values of a dense or sparse gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(
            fn(gradient.values), gradient.indices, gradient.dense_shape
        )
    return fn(gradient)


@keras.saving.register_keras_serializable(package="tfdist")
class MultiOptimizer(keras.optimizers.Optimizer):
    """Different optimizers for different variables of one model.

    What `tf.estimator.DNNLinearCombinedClassifier` did with its
    `linear_optimizer` and `dnn_optimizer`, for any split of the variables.

    >>> optimizer = MultiOptimizer([
    ...     ("wide", keras.optimizers.Ftrl(0.1)),
    ...     ("", keras.optimizers.Adagrad(0.05)),
    ... ])

    Args:
        optimizers: `(pattern, optimizer)` pairs. A variable belongs to the
            first pair whose regular expression is found in its `path`; the
            empty pattern takes all that are left.
        name: Name of the optimizer.

    Raises:
        ValueError: no pair, or (when built) a variable that no pattern matches.
    """

    def __init__(
        self,
        optimizers: Sequence[tuple[str, keras.optimizers.Optimizer]],
        name: str = "multi_optimizer",
    ) -> None:
        if not optimizers:
            raise ValueError(
                "Argument `optimizers` must have at least one "
                f"(pattern, optimizer) pair. Received: {optimizers!r}."
            )
        # The learning rate is never used: each part has its own.
        super().__init__(learning_rate=0.0, name=name)
        self.patterns = [pattern for pattern, _ in optimizers]
        self.parts = [keras.optimizers.get(part) for _, part in optimizers]

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Builds each part for the variables that belong to it."""
        super().build(variables)
        for i, part in enumerate(self.parts):
            part.build([v for v in variables if self._owner(v) == i])

    @property
    def variables(self) -> list[keras.Variable]:
        """The counter of this optimizer and the variables of its parts."""
        return [
            self.iterations,
            *(v for part in self.parts for v in part.variables),
        ]

    def split(
        self, gradients: Sequence[Gradient], variables: Sequence[keras.Variable]
    ) -> list[tuple[keras.optimizers.Optimizer, list]]:
        """`(part, [(gradient, variable), ...])` for each part with any."""
        pairs = list(zip(gradients, variables, strict=True))
        split = [
            (part, [p for p in pairs if self._owner(p[1]) == i])
            for i, part in enumerate(self.parts)
        ]
        return [(part, own) for part, own in split if own]

    def apply(
        self,
        grads: Sequence[Gradient],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """As `keras.optimizers.Optimizer.apply`, for use outside tfdist."""
        variables = trainable_variables or self._trainable_variables
        if not self.built:
            self.build(list(variables))
        for part, pairs in self.split(grads, variables):
            part.apply(*zip(*pairs, strict=True))
        self.iterations.assign_add(1)

    def _owner(self, variable: keras.Variable) -> int:
        for i, pattern in enumerate(self.patterns):
            if re.search(pattern, variable.path):
                return i
        raise ValueError(
            f"No pattern of {self.name!r} matches variable {variable.path!r}. "
            f"Patterns: {self.patterns}. End the list with an empty pattern to "
            "take all variables that are left."
        )

    def get_config(self) -> dict[str, Any]:
        """Configuration from which `from_config` makes the same optimizer."""
        parts = [keras.optimizers.serialize(part) for part in self.parts]
        return {
            "name": self.name,
            "optimizers": list(zip(self.patterns, parts, strict=True)),
        }

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict | None = None
    ) -> MultiOptimizer:
        """Makes an optimizer from `get_config()`."""
        parts = [
            (pattern, keras.optimizers.deserialize(part, custom_objects))
            for pattern, part in config["optimizers"]
        ]
        return cls(parts, name=config["name"])
