"""A worker's share of the records, kept in files of a directory.

What was fetched, unpacked, cut into records and shared out once is read from
there the next time: one file for each file of the data, written as a whole
before anything is read from it. Its name is in a marker that is written after
it, so what a killed process has left is never taken for whole; and the
marker's own name tells path, size and time of the data, so what was cached of
other data is never read either. (After a kill, `Dataset.cache` to a file and
`Dataset.snapshot` raise errors until somebody cleans up.)
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import uuid
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfdist._tf import storage
from tfdist.data.blocks import Files

_THREADS = 16


class BlockCache:
    """Blocks of records, by file.

    Args:
        directory: where to keep them, local or `gs://`; made if missing.
        files: where the records come from.
        layout: what else tells these blocks from others of the same file.
    """

    def __init__(self, directory: str, files: Files, layout: str) -> None:
        with tf.init_scope():
            storage.make_directory(directory)
            self._markers = [
                os.path.join(directory, key) for key in _keys(files, layout)
            ]
        self._writer = uuid.uuid4().hex

    def write(
        self, index: tf.Tensor, share: tf.Tensor, blocks: tf.data.Dataset
    ) -> tf.Tensor:
        """Writes the blocks of a worker's share of a file, if they are missing.

        Args:
            index: of the file, int64.
            share: which records of it the worker keeps, int64.
            blocks: of `(records, places)`.

        Returns:
            A scalar, when that is done.
        """
        marker = self._marker(index, share)
        path = tf.strings.join([marker, ".", self._writer])

        def write() -> tf.Tensor:
            written = tf.raw_ops.DatasetToTFRecord(
                input_dataset=tf.data.experimental.to_variant(
                    blocks.flat_map(_encoded)
                ),
                filename=path,
                compression_type="",
            )
            with tf.control_dependencies([written]):
                marked = tf.io.write_file(marker, path)
            with tf.control_dependencies([marked]):
                return tf.constant(True)

        def is_whole() -> tf.Tensor:
            # Another may be just about to write the marker.
            return tf.strings.length(tf.io.read_file(marker)) > 0

        exists = tf.size(tf.io.matching_files(marker)) > 0
        whole = tf.cond(exists, is_whole, lambda: tf.constant(False))
        return tf.cond(whole, lambda: tf.constant(True), write)

    def read(self, index: tf.Tensor, share: tf.Tensor) -> tf.data.Dataset:
        """What `write` has written."""
        path = tf.io.read_file(self._marker(index, share))
        records = tf.data.TFRecordDataset(path)
        return records.batch(2, drop_remainder=True).map(_decoded)

    def _marker(self, index: tf.Tensor, share: tf.Tensor) -> tf.Tensor:
        share = tf.strings.as_string(share)
        return tf.strings.join([tf.gather(self._markers, index), "-", share])


def _encoded(records: tf.Tensor, places: tf.Tensor) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(
        [tf.io.serialize_tensor(records), tf.io.serialize_tensor(places)]
    )


def _decoded(two: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return (
        tf.ensure_shape(tf.io.parse_tensor(two[0], tf.string), [None]),
        tf.ensure_shape(tf.io.parse_tensor(two[1], tf.int64), [None]),
    )


def _keys(files: Files, layout: str) -> Sequence[str]:
    """A name for what each file holds, another one when it was changed."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        stats = list(pool.map(tf.io.gfile.stat, files.paths))
    columns = [np.asarray(column).tolist() for column in files.sources]
    sources = zip(*columns, strict=True)
    keys = []
    for i, (path, stat, source) in enumerate(
        zip(files.paths, stats, sources, strict=True)
    ):
        # The place of a record holds the number of its file.
        parts = (i, path, stat.length, stat.mtime_nsec, source)
        text = repr((*parts, files.unit, files.expected, layout))
        keys.append(hashlib.blake2b(text.encode(), digest_size=12).hexdigest())
    return keys
