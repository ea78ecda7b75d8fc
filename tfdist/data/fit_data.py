"""Input functions from the data of Keras' `fit`: arrays, frames, PyDatasets."""

from __future__ import annotations

import functools
import itertools
import logging
import random
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.private_keras import py_dataset_batches, py_dataset_spec
from tfdist.data.input_fns import InputFn, checked
from tfdist.data.worker_context import pass_numbers, read_by_all

_log = logging.getLogger(__name__)

_ENDLESS = tf.data.INFINITE_CARDINALITY
# Limit of a Protocol Buffers message (2 GiB), with room for its other parts.
_MOST_BYTES = 2_000_000_000
_DATASETS = tf.data.Dataset | keras.utils.PyDataset
# Maps the number of a pass over the data to its batches.
OnePass = Callable[[tf.Tensor], tf.data.Dataset]


def input_fns(
    data: Any,
    name: str,
    *,
    batch_size: int | None = None,
    shuffle: bool = False,
    seed: int = 0,
    on_ps: bool = False,
) -> tuple[InputFn, InputFn]:
    """Returns two input functions: for one pass in order, and for all passes.

    `data` is argument `name` of `tfdist.fit`. With `shuffle` each pass is in a
    different order, from TensorFlow's seed if it is set, else from `seed`. With
    `on_ps`, each pass distributes arrays to the workers again.
    """
    if on_ps and isinstance(data, _DATASETS):
        raise local_dataset_error(data, name)
    if isinstance(data, tf.data.Dataset):
        return lambda: data, lambda: data.repeat()
    if callable(data):

        @functools.wraps(data)
        def repeated(*args: tf.distribute.InputContext) -> tf.data.Dataset:
            return checked(data(*args), data).repeat()

        return data, repeated
    if isinstance(data, keras.utils.PyDataset):
        length, passes = data.num_batches, functools.partial(_loaded, data)
    else:
        arrays, batch_size = _arrays(data, name), batch_size or 32
        if on_ps:
            _check_sendable(arrays, name)
        length = -(-len(tf.nest.flatten(arrays)[0]) // batch_size)
        passes = functools.partial(_dealt, arrays, batch_size)
    alone = tf.distribute.InputContext()

    def once() -> tf.data.Dataset:
        dataset = passes(alone, None)(tf.constant(0, tf.int64))
        size = _ENDLESS if length is None else length
        return dataset.apply(tf.data.experimental.assert_cardinality(size))

    def endless(context: tf.distribute.InputContext) -> tf.data.Dataset:
        read_by_all(context)
        set_seed = tf.compat.v1.get_seed(None)[0]  # Of `tf.random.set_seed`.
        own = seed if set_seed is None else set_seed
        of_pass = passes(context, own if shuffle else None)
        dataset = pass_numbers(context).flat_map(of_pass)
        return dataset.repeat()  # Makes the cardinality infinite.

    return once, endless if on_ps else lambda: endless(alone)


def local_dataset_error(data: Any, name: str) -> ValueError:
    """The error for a dataset passed to a job with parameter servers."""
    return ValueError(
        f"Argument `{name}` is a {type(data).__name__} in this process, which "
        "the workers of a cluster with parameter servers cannot read. Give "
        "arrays, or a function that makes a tf.data.Dataset."
    )


def is_arrays(data: Any) -> bool:
    """Whether `data` consists of arrays, which have to be batched."""
    return not (data is None or isinstance(data, _DATASETS) or callable(data))


def check_ends(dataset: tf.data.Dataset, name: str, instead: str) -> None:
    """Raises `ValueError` if a dataset is infinite and `instead` not given."""
    if dataset.cardinality() == _ENDLESS:
        raise ValueError(
            f"Argument `{instead}` must be given, because `{name}` never ends."
        )


def num_batches(dataset: tf.data.Dataset) -> int:
    """The number of batches of `train`; counts them if it is not known."""
    check_ends(dataset, "train", "steps_per_epoch")
    number = int(dataset.cardinality())
    if number == tf.data.UNKNOWN_CARDINALITY:
        _log.info(
            "Counting the batches of `train`, whose number is not known. Give "
            "`steps_per_epoch` to avoid this."
        )
        number = int(dataset.reduce(np.int64(0), lambda n, *_: n + 1))
    if not number:
        raise ValueError("Argument `train` has no batch.")
    return number


def _arrays(data: Any, name: str) -> Any:
    """Converts data to arrays of one length; floats get Keras' floatx.

    Like Keras, returns one array or dict as it is; what is a list, as a tuple.
    """

    def converted(value: Any) -> np.ndarray:
        array = np.asarray(value)
        is_pandas = hasattr(value, "iloc")
        if is_pandas and array.ndim == 1:
            array = array[:, np.newaxis]  # As Keras does with a series.
        elif is_pandas and array.dtype.kind == "O":
            kinds = {each.kind for each in value.dtypes}
            if kinds <= {*"biuf"}:  # Numbers and bools.
                array = array.astype(keras.config.floatx())
        texts = (isinstance(item, str | bytes) for item in array.flat)
        of_objects = array.dtype.kind == "O" and not all(texts)
        if of_objects or array.dtype.kind in "mMV" or not array.ndim:
            raise TypeError(
                f"Argument `{name}` must be arrays of numbers or strings (for "
                "a frame of several types, dict(frame)), a PyDataset, a tf.data"
                ".Dataset or a function that returns one. Received: a "
                f"{type(value).__name__} of dtype {array.dtype}."
            )
        is_float = array.dtype.kind == "f"
        return array.astype(keras.config.floatx()) if is_float else array

    parts = data if isinstance(data, tuple) else (data,)
    arrays = tf.nest.map_structure(converted, keras.tree.lists_to_tuples(parts))
    flat = tf.nest.flatten(arrays)
    lengths = {len(array) for array in flat}
    if len(lengths) != 1 or lengths == {0}:
        raise ValueError(
            f"The arrays of argument `{name}` must have one length, and at "
            f"least one example. Received lengths: {sorted(lengths)}."
        )
    alone = len(arrays) == 1 and not isinstance(arrays[0], tuple)
    return arrays[0] if alone else arrays


def _check_sendable(arrays: Any, name: str) -> None:
    """Raises `ValueError` if arrays are too large to send to a worker."""
    flat = tf.nest.flatten(arrays)
    numbers = sum(array.nbytes for array in flat if array.dtype.kind != "O")
    texts = (array.flat for array in flat if array.dtype.kind == "O")
    size = numbers + sum(map(len, itertools.chain.from_iterable(texts)))
    if size >= _MOST_BYTES:
        raise ValueError(
            f"Argument `{name}` has arrays of {size / 1e9:.2f} GB. On a "
            "cluster with parameter servers each worker is sent all of them, "
            "in a message of less than 2 GB. Write them to files, and give a "
            "function that reads these, as by tfdist.data.read_tfrecords."
        )


def _dealt(
    arrays: Any,
    batch_size: int,
    context: tf.distribute.InputContext,
    seed: int | None,
) -> OnePass:
    """Returns a function for a worker's share of the batches of arrays."""
    tensors = tf.nest.map_structure(tf.convert_to_tensor, arrays)
    size = len(tf.nest.flatten(arrays)[0])
    workers = context.num_input_pipelines

    def one_pass(number: tf.Tensor) -> tf.data.Dataset:
        order = tf.range(size, dtype=tf.int64)
        if seed is not None:
            shuffled = tf.random.experimental.stateless_shuffle
            order = shuffled(order, [seed, number])
        # The turn rotates, so that no worker always gets an extra batch.
        turn = tf.cast(context.input_pipeline_id, tf.int64) + number
        rows = tf.data.Dataset.from_tensor_slices(order).batch(batch_size)
        return rows.shard(workers, turn % workers).map(read)

    def read(rows: tf.Tensor) -> Any:
        return tf.nest.map_structure(lambda t: tf.gather(t, rows), tensors)

    return one_pass


def _loaded(
    data: keras.utils.PyDataset, _: tf.distribute.InputContext, seed: int | None
) -> OnePass:
    """Returns a function for the batches of a `PyDataset`."""
    spec = py_dataset_spec(data)

    def batches(number: np.int64) -> Iterable[Any]:
        if seed is not None:  # All processes shuffle the same way.
            random.seed(seed + int(number))
        return py_dataset_batches(data, shuffle=seed is not None)

    return lambda number: tf.data.Dataset.from_generator(
        batches, args=(number,), output_signature=spec
    )
