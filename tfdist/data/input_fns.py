"""Checks input functions and their datasets before training.

Errors name the user's function and the expected behavior.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf import private
from tfdist._tf.arguments import check_callable
from tfdist._tf.private import NoneTensorSpec
from tfdist.data.input_wait import InputWatch
from tfdist.data.worker_context import WorkerContext, read_by_all

_log = logging.getLogger(__name__)

InputFn = Callable[..., tf.data.Dataset]
_TENSORS = tf.TensorSpec | tf.RaggedTensorSpec | tf.SparseTensorSpec
# What the Estimator of TensorFlow passed to an input function, by name.
_OF_ESTIMATOR = "mode", "params", "config"
_MADE_OUTSIDE = (
    "uses a dataset that was made outside of it, in this process, which the "
    "workers of a cluster with parameter servers cannot read. Create the whole "
    "dataset in the function."
)


def takes_context(input_fn: InputFn) -> bool:
    """Whether an input function takes an `InputContext`."""
    takes = takes_argument(input_fn, "input_fn", "an InputContext")
    first = next(iter(inspect.signature(input_fn).parameters), "")
    if takes and first in _OF_ESTIMATOR:
        raise ValueError(
            f"Argument `input_fn` takes {first!r}, which TF 2.15's Estimator "
            "passed. Here, its argument is a tf.distribute.InputContext. Bind "
            f"it: `functools.partial(input_fn, {first}=...)`."
        )
    return takes


def takes_argument(function: Callable, name: str, given: str) -> bool:
    """Whether a user's function has one required argument.

    `*args` and `**kwargs`, as of a wrapper without `functools.wraps`, do not
    count. Raises a ValueError, with `name` and `given`, for other signatures.
    """
    check_callable(name, function)
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
    """Wraps an input function to check its dataset and return it `untuned`."""
    takes = takes_context(input_fn)
    watch = InputWatch(lambda: {f"input function {described(input_fn)}": 1})

    def dataset_of(context: tf.distribute.InputContext) -> tf.data.Dataset:
        if not takes:
            read_by_all(context)
        try:
            with watch:
                dataset = input_fn(context) if takes else input_fn()
                if not (takes or tf.executing_eagerly()):
                    _warn_of_shards(input_fn)
        except (TypeError, ValueError, AttributeError) as error:
            if tf.executing_eagerly():
                raise
            if "larger than 2GB" in str(error):
                raise ValueError(
                    f"Input function {described(input_fn)} contains arrays, "
                    "which are sent to each worker in a message of less than "
                    "2 GB. Let it read files instead."
                ) from error
            raise ValueError(
                f"Input function {described(input_fn)} runs here, but not on a "
                "worker of a parameter-server job, for which TensorFlow traces "
                "it: there a tensor has no value. Call `adapt`, `numpy()` and "
                "the like before training, outside of the input function, or "
                "in a function with `@functools.cache` that it calls; each "
                "worker gets a copy of the layer. TensorFlow says: "
                + str(error).partition("\n")[0]
            ) from error
        return untuned(_of_tensors(checked(dataset, input_fn), input_fn))

    def call(context: tf.distribute.InputContext) -> tf.data.Dataset:
        try:
            return dataset_of(context)
        except tf.errors.InvalidArgumentError as error:
            # From a dataset that is older than this process's cluster.
            if "unknown device" not in error.message:
                raise
            raise ValueError(
                f"Input function {described(input_fn)} {_MADE_OUTSIDE}"
            ) from error

    return call


def _warn_of_shards(input_fn: InputFn) -> None:
    """Warns of a shard that all workers read, in a graph made for them."""
    for op in tf.compat.v1.get_default_graph().get_operations():
        if op.type != "ShardDataset":
            continue
        number, index = map(tf.get_static_value, op.inputs[1:])
        if number is not None and number > 1:
            _log.warning(
                "Every worker reads shard %s of %s: input function %s runs "
                "here, for all of them, so none reads the other shards. To "
                "share the data, let it take a tf.distribute.InputContext, and "
                "use its `num_input_pipelines` and `input_pipeline_id`.",
                index,
                number,
                described(input_fn),
            )


def checked(dataset: Any, input_fn: InputFn) -> tf.data.Dataset:
    """Returns what an input function returned, if it is a dataset."""
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            f"Input function {described(input_fn)} must return a "
            f"tf.data.Dataset of batches. Received: {dataset!r} of type "
            f"{type(dataset).__name__}. Arrays become a dataset by "
            "`tf.data.Dataset.from_tensor_slices((features, labels))"
            ".batch(...)`, a generator by `from_generator`."
        )
    return dataset


def trace_for_workers(
    input_fn: InputFn, num_workers: int, first_pass: Callable[[], tf.Tensor]
) -> tuple[tf.types.experimental.ConcreteFunction, WorkerContext]:
    """Traces an input function for all workers; returns it with its context.

    Each worker starts with the `first_pass` that it reads in its call.
    """
    contexts = []

    def dataset() -> tf.data.Dataset:
        # `tf.distribute` itself would pass pipeline 0 of 1 to every worker.
        coordinators = tf.distribute.coordinator
        index = coordinators.experimental_get_current_worker_index()
        contexts.append(WorkerContext(num_workers, index, first_pass()))
        return input_fn(contexts[-1])

    # AutoGraph would convert every function it calls, which takes seconds.
    traced = tf.function(dataset, autograph=False).get_concrete_function()
    if any(tensor.dtype == tf.variant for tensor in traced.inputs):
        raise ValueError(f"The input function {_MADE_OUTSIDE}")
    private.copy_tables(traced)
    return traced, contexts[-1]


def counted(
    input_fn: InputFn, num_batches: int, is_asked: bool = True
) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
    """Wraps an input function to tell with each batch how many will follow.

    It reads `num_batches` ahead and keeps them in memory, unless they would be
    lost with a worker (`one_pass`) and `is_asked` is False. If it reads none,
    the cardinality tells; where that is unknown, none is certain to follow.

    >>> data = tf.data.Dataset.range(4)
    >>> for num_batches in (0, 2):
    ...     pairs = counted(lambda _: data, num_batches)(None)
    ...     print([int(remaining) for _, remaining in pairs])
    [3, 2, 1, 0]
    [2, 2, 1, 0]
    """

    def call(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset, datasets = input_fn(context), tf.data.Dataset
        lost = getattr(context, "each_once", False) and not is_asked
        if num_batches and not lost:
            numbered = datasets.zip((dataset, datasets.range(tf.int64.max)))
            windows = numbered.window(num_batches + 1, shift=1)
            return windows.flat_map(first_of_window)
        last = dataset.cardinality() - 1  # Negative if it is not known.
        zeros = datasets.from_tensors(np.int64(0)).repeat()
        numbers = datasets.range(last, -1, -1).concatenate(zeros)
        return datasets.zip((dataset, numbers))

    @tf.autograph.experimental.do_not_convert
    def first_of_window(
        batches: Any, numbers: tf.data.Dataset
    ) -> tf.data.Dataset:
        remaining = tf.data.Dataset.from_tensors(numbers.cardinality() - 1)
        return tf.data.Dataset.zip((batches, remaining))

    return call


def _of_tensors(dataset: tf.data.Dataset, input_fn: InputFn) -> tf.data.Dataset:
    """Drops targets and weights that are None, like Keras; checks the rest."""
    spec = dataset.element_spec
    while isinstance(spec, tuple) and isinstance(spec[-1], NoneTensorSpec):
        dataset, spec = dataset.map(lambda *parts: parts[:-1]), spec[:-1]
    for path, part in keras.tree.flatten_with_path(spec):
        if not isinstance(part, _TENSORS) or part.shape.rank == 0:
            keys = "".join(f"[{key!r}]" for key in path)
            raise ValueError(
                f"The dataset of input function {described(input_fn)} must "
                "give batches, which must be of tensors. Received: "
                f"batch{keys} is a {part}. Make a tensor of it by `map` or "
                "`flat_map` (of a window by its `batch`), leave it out, or "
                "make batches of examples by `dataset.batch(...)`."
            )
    return dataset


def untuned(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Turns tf.data's autotuner off, unless the user has set the option.

    When an iterator is deleted, its tuning thread can miss that (if it checks
    the flag just before it is set) and sleep for up to a minute. The thread
    that deletes the iterator waits with the GIL held: in the chief of a job
    that recovers, or in a worker. Without autotuning, `AUTOTUNE` means a thread
    per CPU, at most sixteen.
    """
    with warnings.catch_warnings():
        # A worker's graph warns of unknown options, but knows those set in it.
        warnings.simplefilter("ignore", UserWarning)
        if dataset.options().autotune.enabled is not None:
            return dataset
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def without_context(input_fn: InputFn) -> Callable[[], tf.data.Dataset]:
    """Like `with_context`, for a single process."""
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
        if not getattr(error, "source_told", False):
            error.source_told = True  # type: ignore[union-attr]
            name, rule = described(input_fn), ""
            if "in the collective instance" in str(error):
                rule = " It must return the same batches in every process."
            error.add_note(
                f"The batches come from input function {name}.{rule}"
            )
        raise


@contextlib.contextmanager
def unnamed() -> Iterator[None]:
    """Keeps `named` from adding its note to errors raised in here."""
    try:
        yield
    except Exception as error:
        error.source_told = True  # type: ignore[attr-defined]
        raise


def check_batches(
    model: keras.Model, element_spec: Any, targets: bool = True
) -> None:
    """Raises ValueError if a dataset does not match a built model's inputs.

    If names differ, Keras matches features by position, with at most a warning:
    an extra feature shifts all that follow it. `targets` says whether a
    compiled loss needs targets.
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
    if targets and model.loss is not None and any(_are_strings(y)):
        raise ValueError(
            f"The loss of model {model.name!r} cannot be computed of strings. "
            f"Received targets: {y}. Use `keras.layers.StringLookup` in the "
            "input function."
        )


def _check_features(
    model: keras.Model, inputs: list[keras.KerasTensor], features: Any
) -> None:
    # A `Sequential` model has one input and no structure.
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
    missing = expected.keys() - features
    # If the inputs are a list, Keras selects features by name.
    unread = features.keys() - expected if by_key else set()
    differ = any(
        _are_strings(expected[name]) != _are_strings(features[name])
        for name in expected.keys() & features
    )
    if missing or unread or differ:
        raise ValueError(
            f"The features of the dataset are not the inputs of model "
            f"{model.name!r}.\n"
            f"  Inputs of the model: {_listed(expected)}.\n"
            f"  Features of the dataset: {_listed(features)}.\n"
            "Give both the same names, and remove features from the dataset "
            "that the model does not read."
        )


def _are_strings(parts: Any) -> list[bool]:
    dtypes = (getattr(part, "dtype", None) for part in tf.nest.flatten(parts))
    return [dtype in ("string", tf.string) for dtype in dtypes]


def _listed(features: Mapping[Any, Any]) -> str:
    listed = []
    for name, value in sorted(features.items(), key=str):
        parts = tf.nest.flatten(value)
        kinds = [f"{tf.as_dtype(p.dtype).name} {p.shape}" for p in parts]
        listed.append(f"{name} ({', '.join(kinds)})")
    return ", ".join(listed)
