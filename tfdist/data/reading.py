"""From files to batches: one pipeline for every format.

    pass 0, 1, ... -> this worker's files -> blocks of records -> its records
          -> cache -> shuffle -> parse many at once -> batches

It consists of TensorFlow operations alone, so a parameter-server job can build
it in the chief and run it on its workers, each with its own index, there a
tensor.

Every pass deals the examples again, by a rule that all workers know: in `n`
passes each of `n` workers reads everything once. So what a dead or slow worker
does not read in one pass, others read in the next, and a worker that is left
alone does not memorize a part of the data. No two workers read the same example
in the same pass.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import random
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfdist.data import record_files
from tfdist.data.block_cache import BlockCache
from tfdist.data.blocks import Files, Parse, RecordParser, read_blocks
from tfdist.data.worker_context import first_pass, read_by_all

# AutoGraph finds nothing to convert in the functions below; it takes its time.
_as_written = tf.autograph.experimental.do_not_convert

# Records in a block, primes: a file whose length is a multiple is read twice.
_BLOCKS = (13, 61, 251)
_BLOCK_BYTES = 1 << 20
_BUFFER_BYTES = 256 << 20
_BUFFER_RECORDS = 10_000
_PARSED_BYTES = 4 << 20
_PARSED_RECORDS = 2048
# What a worker that was started again skips takes time to read.
_MOST_SKIPPED = 64 << 20
# Files by which the share of one worker may exceed that of another.
_UNEVEN = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How records become batches: the keyword arguments of every `read_*`.

    Attributes:
        context: which of several workers reads: what `tf.distribute`, or
            `tfdist.Estimator`, gives the input function. `input_pipeline_id`
            may be a tensor. That of a parameter-server job also says where a
            worker begins that was started again; see `WorkerContext`.
            Default: the only one.
        num_epochs: passes, in each of which this worker reads another share.
            Default: without end.
        shuffle: whether in random order, another one in every pass: the files,
            then the records within a buffer. If not, one file after another,
            sorted by name.
        shuffle_buffer_size: records in the buffer. Default: 10,000, or as many
            as fit in 256 MB.
        seed: of the order; each worker adds its index. Default: that of
            `tf.random.set_seed`, and by chance if none is set.
        deterministic: whether the same seed gives the same order, at the price
            of waiting for a slow file while others are ready. Default: where a
            seed is set, or nothing is shuffled.
        drop_remainder: whether the last batch of a finite dataset is left out
            if it is not full, so that the shapes of all are static, as a TPU
            needs them. Without end, every batch is full.
        shard_by: "file": in each pass a worker reads files of its own;
            "example": all read every file, and each keeps every n-th record.
            Default: by file if no worker gets over 1.25 times the files of
            another, else by example.
        num_parallel_reads: files that are read at the same time.
        transform: a function of what was parsed, which treats each example by
            itself: it gets more than one batch at once. Use `dataset.map` for
            one that does not. What a random one draws is no part of the saved
            position of the input: a resumed job reads the same examples, and
            draws other numbers.
        check_gzip: whether compressed files are unpacked once before, since
            TensorFlow takes one that was cut off for whole. Default: where
            they have at most 1 GiB together.
        cache: where the records that this worker reads stay, so that files
            that are far away or compressed are read only once. True: in
            memory, and in each saved position of the input, too; then a worker
            keeps the share of its first pass for good, and what a dead one
            held nobody reads. A path: in a directory, local or `gs://`, the
            same for all workers if need be, also for the next run (a worker
            has cached everything after as many passes as there are workers);
            a file is copied as a whole before its first record is given. It is
            never cleared: delete it when nobody reads from it. Records are
            cached before they are shuffled and parsed: each pass has an order
            of its own (in memory, within the buffer), and `transform` may be
            random. Default: nowhere.

    Raises:
        TypeError: `cache` is neither True nor a path.
        ValueError: a number out of range, an unknown `shard_by`, or a pattern
            for a directory.
    """

    context: tf.distribute.InputContext | None = None
    num_epochs: int | None = None
    shuffle: bool = True
    shuffle_buffer_size: int | None = None
    seed: int | None = None
    deterministic: bool | None = None
    drop_remainder: bool = False
    shard_by: str | None = None
    num_parallel_reads: int = 16
    transform: Callable[[Any], Any] | None = None
    check_gzip: bool | None = None
    cache: bool | str | os.PathLike | None = None

    def __post_init__(self) -> None:
        for name in ("num_epochs", "shuffle_buffer_size", "num_parallel_reads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(
                    f"Argument `{name}` must be positive. "
                    f"Received: {name}={value}."
                )
        if self.shard_by not in (None, "file", "example"):
            raise ValueError(
                'Argument `shard_by` must be "file" or "example". '
                f"Received: shard_by={self.shard_by!r}."
            )
        if not isinstance(self.cache, bool | str | os.PathLike | None):
            raise TypeError(
                "Argument `cache` must be True, for memory, or the path of a "
                f"directory. Received: cache={self.cache!r}."
            )
        directory = self.cache_directory
        if directory is not None and not re.fullmatch(
            r"[^*?[\]\\]+", directory
        ):
            raise ValueError(
                "Argument `cache` must be the path of a directory, without "
                "`*`, `?`, brackets or backslashes. "
                f"Received: cache={self.cache!r}."
            )

    @property
    def cache_directory(self) -> str | None:
        """Where records are kept, if in files."""
        if isinstance(self.cache, bool | None):
            return None
        return os.fspath(self.cache)

    @property
    def num_workers(self) -> int:
        """How many pipelines share the records."""
        return self.context.num_input_pipelines if self.context else 1

    @property
    def worker(self) -> tf.Tensor:
        """Which of them this one is, int64."""
        index = self.context.input_pipeline_id if self.context else 0
        return tf.cast(index, tf.int64)


def batches(
    files: Files, parse: Parse, batch_size: int, options: ReadOptions
) -> tf.data.Dataset:
    """Batches of one worker's share of the records.

    Args:
        files: where the records are.
        parse: from a vector of records to examples, the batch first.
        batch_size: examples in a batch.
        options: all else.

    Returns:
        A dataset of what `parse` and `options.transform` return, which
        `tf.distribute` will not shard again.

    Raises:
        ValueError: `batch_size` is not positive, or there is no example, and
            without end none would ever come.
    """
    if batch_size < 1:
        raise ValueError(
            "Argument `batch_size` must be positive. "
            f"Received: batch_size={batch_size}."
        )
    deterministic = options.deterministic
    seed = _seed(options)
    if deterministic is None:
        deterministic = seed is not None or not options.shuffle
    if seed is None:
        seed = random.SystemRandom().getrandbits(31)
    endless = options.num_epochs is None
    with tf.init_scope():
        size = _record_bytes(files, endless)
    records = _passes(files, options, size, seed)
    together = min(_PARSED_RECORDS, 1 + _PARSED_BYTES // size) // batch_size
    together = max(1, together)
    full = endless or options.drop_remainder
    dataset = records.batch(
        together * batch_size, drop_remainder=full and together == 1
    ).map(
        _as_written(RecordParser(files, parse)),
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    if options.transform is not None:
        dataset = dataset.map(
            options.transform, num_parallel_calls=tf.data.AUTOTUNE
        )
    if together > 1:
        dataset = dataset.rebatch(batch_size, drop_remainder=full)
    if endless:
        # What reads it may take many steps at once only if it has no end.
        dataset = dataset.apply(
            tf.data.experimental.assert_cardinality(
                tf.data.INFINITE_CARDINALITY
            )
        )
    settings = tf.data.Options()
    settings.deterministic = deterministic
    settings.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.OFF
    )
    # Or no position could be saved: TensorFlow takes the search for a record
    # that cannot be parsed, and the writing of a cache, for a state.
    settings.experimental_external_state_policy = (
        tf.data.experimental.ExternalStatePolicy.IGNORE
    )
    return dataset.prefetch(tf.data.AUTOTUNE).with_options(settings)


def shards_by_file(
    num_files: int, num_workers: int, shard_by: str | None = None
) -> bool:
    """Whether workers get files of their own, or all read every file.

    >>> [shards_by_file(n, 4) for n in (1, 4, 5, 8, 17, 1000)]
    [False, True, False, True, True, True]

    Raises:
        ValueError: by file, where there are fewer files than workers.
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


def _seed(options: ReadOptions) -> int | None:
    """The user's seed, for this input or for all of TensorFlow."""
    if options.seed is not None:
        return options.seed
    return tf.compat.v1.get_seed(None)[0]


def _record_bytes(files: Files, endless: bool) -> int:
    """Mean length of some records at the start of the first files.

    Raises:
        ValueError: there is no record at all, and `endless` would look for one
            for ever.
    """
    starts = tf.data.Dataset.from_tensor_slices(files.sources).flat_map(
        lambda *source: files.read(*source).take(16)
    )
    lengths = []
    with contextlib.suppress(tf.errors.OpError):  # Told when they are read.
        for record in starts.take(48).as_numpy_iterator():
            lengths.append(len(record))
    # There may be more headers and blank lines than these.
    if endless and len(lengths) < 48 and _are_empty(files):
        raise ValueError(
            f"There is no example in the {len(files.paths)} files to read (the "
            f"first is {files.paths[0]}). Check their names, and that they "
            "were written to the end."
        )
    return 1 + sum(lengths) // max(1, len(lengths))


def _are_empty(files: Files) -> bool:
    """Whether all can be read, and none has a record."""
    sources = tf.data.Dataset.from_tensor_slices(
        (list(files.paths), files.sources)
    )
    records = sources.enumerate().flat_map(
        lambda i, source: read_blocks(files, _BLOCKS[0], i, *source, 1, 0)
    )
    with contextlib.suppress(tf.errors.OpError):
        return not any(True for _ in records.unbatch().take(1))
    return False


def _file_bytes(files: Files) -> int:
    """Mean size of the first files, unpacked; `_MOST_SKIPPED` at most."""
    lengths = [0]
    with contextlib.suppress(tf.errors.OpError):
        lengths = [
            tf.io.gfile.stat(path).length
            # Text is packed to a quarter or so.
            * (4 if record_files.compression(path) else 1)
            for path in files.paths[:3]
        ]
    return min(sum(lengths) // len(lengths), _MOST_SKIPPED)


def _passes(
    files: Files, options: ReadOptions, size: int, seed: int
) -> tf.data.Dataset:
    """A worker's (record, place), pass by pass, each in an order of its own."""
    first = first_pass(options.context)
    passes = tf.data.Dataset.counter(tf.cast(first, tf.int64))
    passes = passes.take(
        -1 if options.num_epochs is None else options.num_epochs
    )
    # Far apart, or worker 1 of seed 0 would be worker 0 of seed 1.
    own_seed = seed + 1_000_003 * options.worker
    buffer = options.shuffle_buffer_size or min(
        _BUFFER_RECORDS, 1 + _BUFFER_BYTES // size
    )
    read = functools.partial(_blocks, files, options, size, own_seed)
    if options.cache is True:
        share = read(first).cache()
    else:
        read_by_all(options.context)

    def records(number: tf.Tensor) -> tf.data.Dataset:
        blocks = share if options.cache is True else read(number)
        if not options.shuffle:
            return blocks.unbatch()
        seed = own_seed + 15_485_863 * number
        return _shuffled(blocks.unbatch(), buffer, seed)

    return passes.flat_map(_as_written(records))


def _shuffled(
    records: tf.data.Dataset, buffer: int, seed: tf.Tensor
) -> tf.data.Dataset:
    """As `Dataset.shuffle`, which takes no tensor if the global seed is 0."""
    variant = tf.raw_ops.ShuffleDatasetV3(
        input_dataset=tf.data.experimental.to_variant(records),
        buffer_size=buffer,
        seed=seed,
        seed2=1,  # Both 0 would be by chance.
        seed_generator=tf.raw_ops.DummySeedGenerator(),
        output_types=[tf.string, tf.int64],
        output_shapes=[[], []],
    )
    return tf.data.experimental.from_variant(variant, records.element_spec)


def _blocks(
    files: Files,
    options: ReadOptions,
    size: int,
    seed: tf.Tensor,
    number: tf.Tensor,
) -> tf.data.Dataset:
    """A worker's blocks of (record, place) in the pass of a number.

    In `workers` passes one after the other, each worker has each turn once.
    """
    workers = options.num_workers
    number = tf.cast(number, tf.int64)
    turn = (options.worker + number) % workers
    by_file = shards_by_file(len(files.paths), workers, options.shard_by)
    own = tf.range(len(files.paths), dtype=tf.int64)
    shuffled = tf.random.experimental.stateless_shuffle
    if by_file and workers > 1:
        if options.shuffle:
            # The same for all workers, whatever their seeds.
            own = shuffled(own, [options.seed or 0, number // workers])
        own = own[turn::workers]
    cycle_length = 1
    if options.shuffle:
        own = shuffled(own, [seed, number])
        cycle_length = min(options.num_parallel_reads, len(files.paths))
    block = max(
        b for b in _BLOCKS if b * size <= _BLOCK_BYTES or b == _BLOCKS[0]
    )
    # Each keeps every n-th record, the first file from its own turn on.
    every = 1 if by_file else workers
    first, most = first_pass(options.context), None
    if options.shuffle and (tf.is_tensor(first) or first > 0):
        in_a_file = _file_bytes(files) // (block * size)
        again = (number == first) & (number > 0)
        most = tf.where(again, tf.constant(in_a_file, tf.int64), 0)
    cache = None
    if options.cache_directory is not None:
        cache = BlockCache(options.cache_directory, files, f"{block} {every}")

    def read(index: tf.Tensor) -> tf.data.Dataset:
        path = tf.gather(list(files.paths), index)
        source = tuple(tf.gather(column, index) for column in files.sources)
        offset = (turn - index) % every
        blocks = read_blocks(files, block, index, path, source, every, offset)
        if cache is not None:
            written = cache.write(index, offset, blocks)
            with tf.control_dependencies([written]):
                blocks = cache.read(index, offset)
        if most is not None:
            blocks = _begun_elsewhere(blocks, most, [seed + number, index])
        return blocks

    return tf.data.Dataset.from_tensor_slices(own).interleave(
        _as_written(read),
        cycle_length=cycle_length,
        block_length=1,
        num_parallel_calls=tf.data.AUTOTUNE if cycle_length > 1 else None,
    )


def _begun_elsewhere(
    blocks: tf.data.Dataset, most: tf.Tensor, seed: list[tf.Tensor]
) -> tf.data.Dataset:
    """The blocks of a file, of which up to `most` come at the end.

    Who was started again begins so: or what comes late in a large file would
    be read only by who lives long enough.
    """
    skipped = tf.random.stateless_uniform(
        [], seed, maxval=most + 1, dtype=tf.int64
    )
    return blocks.skip(skipped).concatenate(blocks.take(skipped))
