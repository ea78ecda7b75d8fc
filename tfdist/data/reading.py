"""The input pipeline from files to batches, for every format.

    pass 0, 1, ... -> this worker's files -> blocks of records -> its records
          -> shuffle -> parse many at once -> batches

The pipeline consists only of TensorFlow operations, so a parameter-server job
can build it on the chief and run it on its workers, whose index is a tensor.

Each pass distributes the examples to the workers anew: in one pass no two
workers read the same example, and in `n` passes each of `n` workers reads all
examples once. Thus other workers read the examples that a dead or slow worker
did not read, and a worker left alone does not memorize a part of the data.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist._tf.arguments import check_at_least, check_one_of
from tfdist._tf.private_positions import LEAST_SEED
from tfdist.data import record_files
from tfdist.data.blocks import Files, Parse, parser, read_blocks
from tfdist.data.worker_context import first_pass, pass_numbers, read_by_all

# AutoGraph would search for code to convert, which takes time.
_as_written = tf.autograph.experimental.do_not_convert

# Records in a block. Primes: a file with a multiple of them is read twice.
_BLOCKS = (13, 61, 251)
_BLOCK_BYTES = 1 << 20
_BUFFER_BYTES = 256 << 20
_BUFFER_RECORDS = 10_000
_PARSED_BYTES = 4 << 20
_PARSED_RECORDS = 2048
# In bytes: a restarted worker has to read the records that it skips.
_MOST_SKIPPED = 64 << 20
# Maximum ratio of the numbers of files of two workers.
_UNEVEN = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read and batch records: the keyword arguments of every `read_*`.

    >>> options = ReadOptions(num_epochs=1, seed=7)
    >>> options.shuffle, options.num_epochs
    (True, 1)

    Attributes:
        context: Identifies this worker: the argument of the input function. Its
            `input_pipeline_id` may be a tensor. See `WorkerContext` for the
            passes of a restarted worker. Default: there is one worker.
        num_epochs: Number of passes over the data; this worker reads a
            different share in each. Default: repeat indefinitely.
        shuffle: Whether to shuffle the files, then the records within a buffer,
            in a different order in each pass. If False, files are read one
            after the other, sorted by name.
        shuffle_buffer_size: Number of records in the buffer. Default: 10,000,
            or as many as fit in 256 MB.
        seed: Seed of the order, from which each worker derives its own.
            Default: that of `tf.random.set_seed`. If none is set, the order is
            random, and a slow file does not delay others that are ready.
        drop_remainder: Whether to drop the last batch of a finite dataset if it
            is not full, so that all shapes are static, as a TPU requires.
            Without `num_epochs` every batch is full.
        shard_by: "file": each worker reads different files in a pass;
            "example": all workers read every file, and each keeps every n-th
            record. Default: "file" if no worker gets more than 1.25 times as
            many files as another, else "example".
        num_parallel_reads: Number of files to read at the same time.
        transform: A function of the parsed examples, which must treat each
            example independently, because it gets more than one batch at once.
            Use `dataset.map` for other functions. Its random numbers are not
            part of the saved position of the input.
        check_gzip: Whether to decompress gzip files once before reading, since
            TensorFlow does not detect truncated files. Default: True if their
            total size is at most 1 GiB.

    Raises:
        ValueError: A number is out of range, or `shard_by` is unknown.
    """

    context: tf.distribute.InputContext | None = None
    num_epochs: int | None = None
    shuffle: bool = True
    shuffle_buffer_size: int | None = None
    seed: int | None = None
    drop_remainder: bool = False
    shard_by: str | None = None
    num_parallel_reads: int = 16
    transform: Callable[[Any], Any] | None = None
    check_gzip: bool | None = None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "shuffle_buffer_size", "num_parallel_reads"):
            check_at_least(name, getattr(self, name), 1)
        check_one_of("shard_by", self.shard_by, (None, "file", "example"))


def batches(
    files: Files, parse: Parse, batch_size: int, options: ReadOptions
) -> tf.data.Dataset:
    """Returns batches of one worker's share of the records."""
    check_at_least("batch_size", batch_size, 1, or_none=False)
    seed = options.seed
    if seed is None:
        seed = tf.compat.v1.get_seed(None)[0]
    deterministic = seed is not None or not options.shuffle
    if seed is None:
        seed = random.SystemRandom().getrandbits(31)
    endless = options.num_epochs is None
    with tf.init_scope():
        size = _record_bytes(files, endless)
    records = _passes(files, options, size, seed)
    at_once = min(_PARSED_RECORDS, 1 + _PARSED_BYTES // size)
    together = max(1, at_once // batch_size)
    full = endless or options.drop_remainder
    drop = full and together == 1
    dataset = records.batch(together * batch_size, drop_remainder=drop)
    autotune = tf.data.AUTOTUNE
    for function in (_as_written(parser(files, parse)), options.transform):
        if function is not None:
            # In order: a batch may be a whole pass; passes would get mixed up.
            dataset = dataset.map(function, autotune, deterministic=True)
    if together > 1:
        dataset = dataset.rebatch(batch_size, drop_remainder=full)
    if endless:
        # Workers need not read batches ahead to know whether data ends.
        infinite = tf.data.INFINITE_CARDINALITY
        no_end = tf.data.experimental.assert_cardinality(infinite)
        dataset = dataset.apply(no_end)
    settings = tf.data.Options()
    settings.deterministic = deterministic
    # The pipeline itself shards the records.
    no_shards = tf.data.experimental.AutoShardPolicy.OFF
    settings.experimental_distribute.auto_shard_policy = no_shards
    # TensorFlow considers assertions stateful, and would not save a position.
    ignore = tf.data.experimental.ExternalStatePolicy.IGNORE
    settings.experimental_external_state_policy = ignore
    return dataset.prefetch(autotune).with_options(settings)


def shards_by_file(
    num_files: int, num_workers: int, shard_by: str | None = None
) -> bool:
    """Whether workers read different files; else all read every file.

    >>> [shards_by_file(n, 4) for n in (1, 4, 5, 8, 17, 1000)]
    [False, True, False, True, True, True]
    """
    if shard_by == "file" and num_files < num_workers:
        raise ValueError(
            "Argument `shard_by` can be 'file' only if every worker gets one. "
            f"Received: {num_files} files for {num_workers} workers."
        )
    if shard_by is not None:
        return shard_by == "file"
    least, rest = divmod(num_files, num_workers)
    return least > 0 and (least + bool(rest)) / least <= _UNEVEN


def _record_bytes(files: Files, endless: bool) -> int:
    """The mean length of some records; raises if infinite data has none."""

    def some(index: tf.Tensor) -> tf.data.Dataset:
        if files.split is None:  # Lines are records.
            return files.lines(index).take(16)
        blocks = read_blocks(files, index, _BLOCKS[0])
        return blocks.unbatch().take(16).map(lambda record, _: record)

    numbers = tf.data.Dataset.range(len(files.paths))
    records = numbers.flat_map(_as_written(some)).take(48)
    lengths = []
    with contextlib.suppress(tf.errors.OpError):  # Raised again when read.
        for record in records.as_numpy_iterator():
            lengths.append(len(record))
        if endless and not lengths:
            raise ValueError(
                f"There is no example in the {len(files.paths)} files to read "
                f"(the first is {files.paths[0]}). Check their names and "
                "contents."
            )
    return 1 + sum(lengths) // max(1, len(lengths))


def _file_bytes(files: Files) -> int:
    """The uncompressed size of the first file, at most `_MOST_SKIPPED`."""
    path = files.paths[0]
    with contextlib.suppress(tf.errors.OpError):  # Raised again when read.
        # Text is compressed to about a quarter.
        times = 4 if record_files.compression(path) else 1
        return min(tf.io.gfile.stat(path).length * times, _MOST_SKIPPED)
    return 0


def _passes(
    files: Files, options: ReadOptions, size: int, seed: int
) -> tf.data.Dataset:
    """Returns a worker's (record, place) pairs of all passes."""
    context = options.context or tf.distribute.InputContext()
    worker = tf.cast(context.input_pipeline_id, tf.int64)
    passes = pass_numbers(context)
    if options.num_epochs is not None:
        passes = passes.take(options.num_epochs)
    # Far apart, or worker 1 with seed 0 would equal worker 0 with seed 1.
    # Large, so that a saved position does not depend on the seed.
    large_seed = LEAST_SEED + seed + 1_000_003 * worker
    default = min(_BUFFER_RECORDS, 1 + _BUFFER_BYTES // size)
    buffer = options.shuffle_buffer_size or default
    read_by_all(context)

    def records(number: tf.Tensor) -> tf.data.Dataset:
        own_seed = large_seed - LEAST_SEED
        blocks = _dealt(files, options, size, worker, own_seed, number)
        if not options.shuffle:
            return blocks.unbatch()
        seed = own_seed + 15_485_863 * number
        return _shuffled(blocks.unbatch(), buffer, seed)

    return passes.flat_map(_as_written(records))


def _dealt(
    files: Files,
    options: ReadOptions,
    size: int,
    worker: tf.Tensor,
    seed: tf.Tensor,
    number: tf.Tensor,
) -> tf.data.Dataset:
    """Returns a worker's blocks of (record, place) in pass `number`."""
    context = options.context or tf.distribute.InputContext()
    workers = context.num_input_pipelines
    # In n consecutive passes, each of n workers has each turn once.
    turn = (worker + number) % workers
    by_file = shards_by_file(len(files.paths), workers, options.shard_by)
    own = tf.range(len(files.paths), dtype=tf.int64)
    shuffled = tf.random.experimental.stateless_shuffle
    if by_file and workers > 1:
        if options.shuffle:
            # The same for all workers, regardless of their seeds.
            own = shuffled(own, [options.seed or 0, number // workers])
        own = own[turn::workers]
    cycle_length = 1
    if options.shuffle:
        own = shuffled(own, [seed, number])
        cycle_length = min(options.num_parallel_reads, len(files.paths))
    small = (block for block in _BLOCKS if block * size <= _BLOCK_BYTES)
    block = max(small, default=_BLOCKS[0])
    every = 1 if by_file else workers
    first, most = first_pass(context), None
    if options.shuffle and (tf.is_tensor(first) or first > 0):
        # Otherwise workers that restart often would never reach the end of a
        # large file.
        begins_again = tf.cast((number == first) & (number > 0), tf.int64)
        most = _file_bytes(files) // (block * size) * begins_again

    def read(index: tf.Tensor) -> tf.data.Dataset:
        offset = (turn - index) % every
        blocks = read_blocks(files, index, block, every, offset)
        if most is None:
            return blocks
        skipped = tf.random.stateless_uniform(
            [], [seed + number, index], maxval=most + 1, dtype=tf.int64
        )
        return blocks.skip(skipped).concatenate(blocks.take(skipped))

    return tf.data.Dataset.from_tensor_slices(own).interleave(
        _as_written(read),
        cycle_length=cycle_length,
        num_parallel_calls=tf.data.AUTOTUNE if cycle_length > 1 else None,
    )


def _shuffled(
    records: tf.data.Dataset, buffer: int, seed: tf.Tensor
) -> tf.data.Dataset:
    """Like `Dataset.shuffle`, whose seed cannot be a tensor if tf's is 0."""
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(records),
        buffer_size=buffer,
        seed=seed,
        seed2=1,  # If both were 0, the seed would be random.
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        output_types=[tf.string, tf.int64],
        output_shapes=[[], []],
    )
    return tf.data.experimental.from_variant(variant, records.element_spec)
