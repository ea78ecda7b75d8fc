"""Checks of common arguments."""

import contextlib
import importlib
import inspect
import numbers
from collections.abc import Callable, Sequence
from types import UnionType
from typing import Any, get_args

_COUNTED = ("seed", "steps", "max", "workers", "staleness", "ahead")


def check_positive(
    argument: str, value: Any, kind: type[Any] = numbers.Integral
) -> None:
    """Raises `ValueError` unless `value` is a number of `kind`, at least 1."""
    if not isinstance(value, kind) or isinstance(value, bool) or not value >= 1:
        raise ValueError(
            f"Argument `{argument}` must be a positive "
            f"{'integer' if kind is numbers.Integral else 'number'}. "
            f"Received: {argument}={value!r}."
        )


def load_function(flag: str, target: str) -> Callable[..., Any]:
    """Loads the function that a flag names as `package.module:function`."""
    module, _, function = target.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"Flag --{flag} must be package.module:function. "
            f"Received: --{flag}={target}, but: {error}"
        ) from error


def check_at_least(
    argument: str, value: Any, least: float, or_none: bool = True
) -> None:
    """Raises an error unless `value` is a number, at least `least`, or None.

    It must be an integer if `least` is 1 or more or the name is one of a count.

    >>> check_at_least("steps", 0, 1)
    Traceback (most recent call last):
    ValueError: Argument `steps` must be at least 1. Received: steps=0.
    """
    if value is None and or_none:
        return
    received = f"Received: {argument}={value!r}."
    counts = least >= 1 or argument.endswith(_COUNTED)
    kind = numbers.Integral if counts else numbers.Real
    if isinstance(value, bool) or not isinstance(value, kind):
        wanted = "an integer" if counts else "a number"
        raise TypeError(f"Argument `{argument}` must be {wanted}. {received}")
    if not float(value) >= least:
        wanted = f"be at least {least}" if least >= 1 else "be positive"
        wanted = "not be negative" if least == 0 else wanted
        raise ValueError(f"Argument `{argument}` must {wanted}. {received}")


def check_type(argument: str, value: Any, wanted: type | UnionType) -> None:
    """Raises `TypeError` unless `value` is a `wanted`.

    >>> check_type("name", 3, str | None)
    Traceback (most recent call last):
    TypeError: Argument `name` must be a str | None. Received: name=3.
    >>> check_type("step", "1", int | np.integer)
    Traceback (most recent call last):
    TypeError: Argument `step` must be an int | numpy.integer. Received: ...
    """
    if not isinstance(value, wanted):
        names = []
        for kind in get_args(wanted) or (wanted,):
            package = kind.__module__.partition(".")[0]
            # tfdist exports those of TensorFlow that users pass.
            ours = {"builtins": "", "tensorflow": "tfdist."}
            names.append(ours.get(package, f"{package}.") + kind.__name__)
        name = " | ".join(names).replace("NoneType", "None")
        article = "an" if name.startswith("int") else "a"
        raise TypeError(
            f"Argument `{argument}` must be {article} {name}. "
            f"Received: {argument}={value!r}."
        )


def check_one_of(argument: str, value: Any, known: Sequence[Any]) -> None:
    """Raises `ValueError` unless `value` is one of `known`."""
    if value not in known:
        raise ValueError(
            f"Argument `{argument}` must be one of {known}. "
            f"Received: {argument}={value!r}."
        )


def check_callable(argument: str, value: Any, *given: str) -> None:
    """Raises `TypeError` unless `value` can be called, with what is `given`.

    >>> check_callable("f", lambda: 1, "a model")
    Traceback (most recent call last):
    TypeError: Argument `f` is called with a model. Received: a function of ().
    """
    if not callable(value):
        raise TypeError(
            f"Argument `{argument}` must be callable. "
            f"Received: {argument}={value!r}."
        )
    if not given:
        return
    with contextlib.suppress(ValueError):  # Not everything has a signature.
        signature = inspect.signature(value)
        try:
            signature.bind(*given)
        except TypeError as error:
            raise TypeError(
                f"Argument `{argument}` is called with {', '.join(given)}. "
                f"Received: a function of {signature}."
            ) from error
