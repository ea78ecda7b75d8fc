"""Different optimizers for different variables of one model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="tfdist")
class MultiOptimizer(keras.optimizers.Optimizer):
    """Different optimizers for different variables of one model.

    Generalizes `linear_optimizer` and `dnn_optimizer` of
    `tf.estimator.DNNLinearCombinedClassifier` to any split of the variables.

    >>> optimizer = MultiOptimizer([
    ...     ("wide", keras.optimizers.Ftrl(0.1)),
    ...     ("", keras.optimizers.Adagrad(0.05)),
    ... ])

    Args:
        optimizers: `(pattern, optimizer)` pairs. A variable belongs to the
            first pair whose regular expression is found in its `path`; the
            empty pattern matches all remaining variables.
        name: Name of the optimizer.

    Raises:
        ValueError: No pair is given, a part has a `loss_scale_factor`, or (when
            built) no pattern matches a variable.
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
        for pattern, part in optimizers:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(
                    f"Pattern {pattern!r} of optimizer {part!r} is not a "
                    f"regular expression: {error}."
                ) from error
            if getattr(part, "loss_scale_factor", None) is not None:
                raise ValueError(
                    f"Optimizer {part.name!r} of a MultiOptimizer must have no "
                    "loss_scale_factor, since it would apply to all variables. "
                    "Wrap the MultiOptimizer in a LossScaleOptimizer."
                )
        # The learning rate is never used: each part has its own.
        super().__init__(learning_rate=0.0, name=name)
        self.patterns = [pattern for pattern, _ in optimizers]
        self.parts = [keras.optimizers.get(part) for _, part in optimizers]
        if len({id(part) for part in self.parts}) < len(self.parts):
            raise ValueError(
                "Each pair of a MultiOptimizer needs an optimizer of its own. "
                f"Received: {optimizers!r}. For one optimizer, join the "
                "patterns with |."
            )

    @property
    def learning_rate(self) -> Any:
        """0.0, as each part has its own. Setting it raises `ValueError`."""
        return super().learning_rate

    @learning_rate.setter
    def learning_rate(self, learning_rate: Any) -> None:
        raise ValueError(
            "Each part of a MultiOptimizer has its own learning rate. Set "
            "that of `parts[i]`, or create the part with a schedule."
        )

    def build(self, variables: Sequence[keras.Variable]) -> None:
        """Builds each part for the variables that belong to it."""
        super().build(variables)
        for i, part in enumerate(self.parts):
            part.build([v for v in variables if self.owner(v) == i])

    @property
    def variables(self) -> list[keras.Variable]:
        """The counter of this optimizer and the variables of its parts."""
        of_parts = [v for part in self.parts for v in part.variables]
        return [self.iterations, *of_parts]

    def apply(
        self,
        grads: Sequence[tf.Tensor | tf.IndexedSlices | None],
        trainable_variables: Sequence[keras.Variable] | None = None,
    ) -> None:
        """See `keras.optimizers.Optimizer.apply`; for use outside tfdist."""
        variables = trainable_variables or self._trainable_variables
        if not self.built:
            self.build(list(variables))
        pairs = list(zip(grads, variables, strict=True))
        for i, part in enumerate(self.parts):
            if own := [pair for pair in pairs if self.owner(pair[1]) == i]:
                part.apply(*zip(*own, strict=True))
        self.iterations.assign_add(1)

    def finalize_variable_values(
        self, var_list: Sequence[keras.Variable]
    ) -> None:
        """Lets each part assign the averages it keeps to its variables."""
        for i, part in enumerate(self.parts):
            own = [v for v in var_list if self.owner(v) == i]
            part.finalize_variable_values(own)

    def owner(self, variable: keras.Variable) -> int:
        """Returns the index of the part that updates `variable`."""
        for i, pattern in enumerate(self.patterns):
            if re.search(pattern, variable.path):
                return i
        raise ValueError(
            f"No pattern of {self.name!r} matches variable {variable.path!r}. "
            f"Patterns: {self.patterns}. End the list with an empty pattern, "
            "which matches all remaining variables."
        )

    def get_config(self) -> dict[str, Any]:
        """See `keras.optimizers.Optimizer.get_config`."""
        parts = map(keras.optimizers.serialize, self.parts)
        pairs = list(zip(self.patterns, parts, strict=True))
        return {"name": self.name, "optimizers": pairs}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict | None = None
    ) -> MultiOptimizer:
        """See `keras.optimizers.Optimizer.from_config`."""
        pairs = [
            (pattern, keras.optimizers.deserialize(part, custom_objects))
            for pattern, part in config["optimizers"]
        ]
        return cls(pairs, name=config["name"])
