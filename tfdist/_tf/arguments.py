"""Checks of arguments that many functions have."""

import importlib
import numbers
from collections.abc import Callable
from typing import Any


def check_positive(
    argument: str, value: Any, kind: type = numbers.Integral
) -> None:
    """Raises ValueError unless `value` is a number, at least 1.

    Args:
        argument: Name of the argument, for the message.
        value: What was received.
        kind: `numbers.Integral` or `numbers.Real`. Default: integers.
    """
    if not isinstance(value, kind) or isinstance(value, bool) or value < 1:
        raise ValueError(
            f"Argument `{argument}` must be a positive "
            f"{'integer' if kind is numbers.Integral else 'number'}. "
            f"Received: {argument}={value!r}."
        )


def load_function(flag: str, target: str) -> Callable[..., Any]:
    """The function that a command's flag names as `package.module:function`.

    Raises:
        ValueError: `target` has another form, or there is no such function.
    """
    module, _, function = target.partition(":")
    if not module or not function:
        raise ValueError(
            f"Flag --{flag} must be package.module:function. "
            f"Received: --{flag}={target}."
        )
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise ValueError(
            f"Flag --{flag} must name a function. Received: --{flag}={target}, "
            f"but: {e}"
        ) from e
