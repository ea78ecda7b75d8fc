"""Checks of input functions and of what they return, before training.

Errors name the user's function and what was expected of it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfdist.data.input_wait import InputWatch
from tfdist.data.worker_context import read_by_all

InputFn = Callable[..., tf.data.Dataset]


def takes_context(input_fn: InputFn) -> bool:
    """Whether an input function has to be called with an `InputContext`."""
    return takes_argument(input_fn, "input_fn", "an InputContext")


def takes_argument(function: Callable, name: str, given: str) -> bool:
    """Whether a user's function has one required argument.

    `*args` and `**kwargs`, as of a wrapper without `functools.wraps`, do not
    count.

    Raises:
        ValueError: it requires other arguments; the message says that argument
            `name` is called with what is `given`.
    """
    signature = inspect.signature(function)
    for takes, args in ((False, ()), (True, (given,))):
        with contextlib.suppress(TypeError):
            signature.bind(*args)
            return takes
    raise ValueError(
        f"Argument `{name}` is called without an argument, or with one that "
        f"has no default: {given}. Received: {described(function)}, which "
        f"takes {signature}. Give the others a default, or bind them by "
        "`functools.partial`."
    )


def with_context(
    input_fn: InputFn,
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """Calls the user's input function and checks that it returns a dataset.

    The dataset does not tune itself unless its options say so; see `untuned`.

    Raises:
        TypeError: (when called) it returns something else.
    """
    takes = takes_context(input_fn)
    watch = InputWatch(lambda: {f"input function {described(input_fn)}": 1})

    def call(context: tf.distribute.InputContext) -> tf.data.Dataset:
        if not takes:
            read_by_all(context)
        with watch:
            dataset = input_fn(context) if takes else input_fn()
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"Input function {described(input_fn)} must return a "
                f"tf.data.Dataset of batches. Received: {dataset!r} of type "
                f"{type(dataset).__name__}. Arrays become a dataset by "
                "`tf.data.Dataset.from_tensor_slices((features, labels))"
                ".batch(...)`, a generator by `from_generator`."
            )
        return untuned(dataset)

    return call


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns tf.data's tuner off where the user has not turned it on.

    When an iterator is dropped, the thread that tunes it can miss that (it
    looks for the flag just before it is set) and sleep on for up to a minute.
    Whoever drops the iterator waits, with Python's lock held: the chief of a
    job that recovers, or a worker. Without the tuner `AUTOTUNE` means a thread
    per CPU, sixteen at most.
    """
    with warnings.catch_warnings():
        # In a worker's graph: that they may be unknown. Not those set in it.
        warnings.simplefilter("ignore", UserWarning)
        if dataset.options().autotune.enabled is not None:
            return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def without_context(input_fn: InputFn) -> Callable[[], tf.data.Dataset]:
    """As `with_context`, for a process alone."""
    return lambda: with_context(input_fn)(tf.distribute.InputContext())


def described(input_fn: InputFn) -> str:
    """The name of a function, and the file and line of its definition.

    >>> described(min)
    '`min`'
    """
    while isinstance(input_fn, functools.partial):
        input_fn = input_fn.func
    name = getattr(input_fn, "__qualname__", type(input_fn).__qualname__)
    code = getattr(input_fn, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code else ""
    return f"`{name}`{where}"


@contextlib.contextmanager
def named(input_fn: InputFn) -> Iterator[None]:
    """Adds a note with the input function's name to errors about batches."""
    try:
        yield
    except (tf.errors.OpError, ValueError) as error:
        error.add_note(
            f"The batches come from input function {described(input_fn)}."
        )
        raise


def check_batches(
    model: keras.Model, element_spec: Any, targets: bool = True
) -> None:
    """Raises ValueError if a dataset has not what a built model reads.

    If names differ, Keras matches features by position, with a warning at most:
    one feature too many shifts all that follow it.

    Args:
        model: Its features are checked if it was made from `keras.Input`s.
        element_spec: Of one batch.
        targets: Whether there must be targets for a compiled loss.
    """
    features, y, _ = keras.utils.unpack_x_y_sample_weight(element_spec)
    inputs = getattr(model, "inputs", None) or []
    if inputs and all(isinstance(i, keras.KerasTensor) for i in inputs):
        _check_features(model, inputs, features)
    own_loss = type(model).compute_loss is not keras.Model.compute_loss
    if targets and y is None and model.loss is not None and not own_loss:
        raise ValueError(
            f"Model {model.name!r} is compiled with a loss, so a batch must be "
            "`(features, targets)` or `(features, targets, sample_weight)`. "
            f"Received batches without targets: {element_spec}."
        )


def _check_features(
    model: keras.Model, inputs: list[keras.KerasTensor], features: Any
) -> None:
    # A `Sequential` has one input, and no structure.
    sequential = isinstance(model, keras.Sequential)
    structure: Any = None if sequential else model.input
    by_key = isinstance(structure, Mapping)
    expected = dict(structure) if by_key else {i.name: i for i in inputs}
    if not isinstance(features, Mapping):
        flat = tf.nest.flatten(features)
        names = sorted(expected) if by_key else list(expected)
        if len(flat) != len(names):
            names = list(range(len(flat)))
        features = dict(zip(names, flat, strict=True))
        by_key = True
    missing = set(expected) - set(features)
    # Where the inputs are a list, Keras picks features by name.
    unread = set(features) - set(expected) if by_key else set()
    both = set(expected) & set(features)
    differ = any(
        _are_strings(expected[name]) != _are_strings(features[name])
        for name in both
    )
    if missing or unread or differ:
        raise ValueError(
            f"The features of the dataset are not the inputs of model "
            f"{model.name!r}.\n"
            f"  Inputs of the model: {_listed(expected)}.\n"
            f"  Features of the dataset: {_listed(features)}.\n"
            "Give both the same names, and leave out of the dataset what the "
            "model does not read."
        )


def _are_strings(parts: Any) -> list[bool]:
    return [
        getattr(part, "dtype", None) in ("string", tf.string)
        for part in tf.nest.flatten(parts)
    ]


def _listed(features: Mapping[Any, Any]) -> str:
    return ", ".join(
        f"{name} ("
        + ", ".join(
            f"{tf.as_dtype(part.dtype).name} {part.shape}"
            for part in tf.nest.flatten(value)
        )
        + ")"
        for name, value in sorted(features.items(), key=str)
    )
