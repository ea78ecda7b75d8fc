"""A source of examples: its schema, and the input functions of a job.

A `Source` gives two input functions and a `Schema`. The schema is what a model
has to know before it sees an example: the columns, how their numbers are
spread, which strings occur. It costs one pass over the data, made when it is
first asked for, so the processes that only serve variables or run steps never
make it; whoever makes it comes to the same result.

The training data set is that of `tfdist.reading`: whatever the source, a share
for each worker, shuffled, parsed many records at a time.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import tensorflow as tf

from tfdist.blocks import Files
from tfdist.reading import ReadOptions, batches

NUMERIC = "numeric"
CATEGORICAL = "categorical"

# A categorical column with more values than this is hashed, not looked up.
MAX_VOCABULARY = 1000
# Buckets of equal count that a numeric column is cut into, at most.
NUM_QUANTILES = 20
SHUFFLE_BUFFER = 20_000

Features = dict[str, tf.Tensor]
Transform = Callable[[Features], Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """What a model knows about one column.

    Attributes:
        name: as in the header of the files, made fit by `column_name`.
        kind: "numeric" (float32, missing is NaN) or "categorical" (string,
            missing is the empty string).
        mean: of the values present in the training data (numeric).
        stddev: their standard deviation, 1 for a constant (numeric).
        boundaries: ascending inner quantiles (numeric).
        vocabulary: every value seen in training, the most frequent first, or
            empty where there are more than `MAX_VOCABULARY` (categorical).
        num_buckets: how many buckets the values are hashed into, 0 with a
            vocabulary (categorical).
    """

    name: str
    kind: str
    mean: float = 0.0
    stddev: float = 1.0
    boundaries: tuple[float, ...] = ()
    vocabulary: tuple[str, ...] = ()
    num_buckets: int = 0


@dataclasses.dataclass(frozen=True)
class Schema:
    """The columns of a data set and the meaning of its label.

    Attributes:
        columns: the features, in the order of the files.
        label: name of the label column.
        positive: the strings of the label column that count as 1. "1" (however
            it is spelled) of 0 and 1, else the one of two strings that sorts
            last: ">50K" of "<=50K" and ">50K", "yes" of "no" and "yes".
        num_train: number of training examples.
    """

    columns: tuple[Column, ...]
    label: str
    positive: tuple[str, ...]
    num_train: int

    @property
    def numeric(self) -> tuple[Column, ...]:
        """The numeric columns."""
        return tuple(c for c in self.columns if c.kind == NUMERIC)

    @property
    def categorical(self) -> tuple[Column, ...]:
        """The categorical columns."""
        return tuple(c for c in self.columns if c.kind == CATEGORICAL)


@dataclasses.dataclass(frozen=True)
class Shard:
    """A stretch of records in one file: `skip` of them, then `take`."""

    path: str
    skip: int
    take: int


def column_name(text: str) -> str:
    """Returns a name that TensorFlow accepts for an input of a model.

    >>> column_name("hours per week"), column_name("_id")
    ('hours_per_week', 'id')
    """
    return re.sub(r"[^A-Za-z0-9_]", "_", text.strip()).lstrip("_")


class Source(abc.ABC):
    """Training and evaluation examples with one schema.

    Attributes:
        description: one line for people.
        best_auc: the best AUC that any model can reach on the evaluation
            examples, None where nobody knows.
    """

    description: str = ""
    best_auc: float | None = None

    @functools.cached_property
    def schema(self) -> Schema:
        """The schema, from one pass over the training examples.

        Raises:
            FileNotFoundError: if there are no files.
            ValueError: if anything in them is not as it must be. The message
                names the file, the line, and what was expected.
        """
        # Also when the first to ask is a function that is being traced.
        with tf.init_scope():
            return self._scan()

    def train_input_fn(
        self,
        input_context: tf.distribute.InputContext | None = None,
        *,
        batch_size: int = 128,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> tf.data.Dataset:
        """Returns the training examples of one worker, shuffled, for ever.

        Each of the `input_context.num_input_pipelines` workers reads other
        examples than its neighbours: whole files if there are enough of them,
        else every n-th record; and it shuffles with a seed of its own. May be
        called inside a `tf.function`, where `input_pipeline_id` is a tensor.

        Args:
            input_context: which worker this is; None for the only one.
            batch_size: examples in a batch; every batch is full.
            transform: maps the features of a batch, for example
                `model.preprocessor(schema)`.
            seed: of the shuffling.

        Returns:
            A data set of `(features, label)`: a dictionary of vectors of
            `batch_size` (or what `transform` makes of it) and a float32 tensor
            of shape `(batch_size, 1)`.
        """
        options = ReadOptions(
            context=input_context,
            seed=seed,
            shuffle_buffer_size=SHUFFLE_BUFFER,
            transform=lambda features, label: (
                (transform(features) if transform else features),
                label,
            ),
        )
        schema = self.schema
        if schema.num_train < options.num_workers:
            raise ValueError(
                "Every worker needs an example of its own. Received: "
                f"{schema.num_train} examples for {options.num_workers} "
                "workers."
            )
        shards = self._shards("train")
        files = Files(
            [shard.path for shard in shards],
            _columns(shards),
            self._read,
            unit="example",
            expected=f"the columns of {self.description}",
        )
        parse = functools.partial(self._example, schema)
        return batches(files, parse, batch_size, options)

    def eval_input_fn(
        self, *, batch_size: int = 1024, transform: Transform | None = None
    ) -> tf.data.Dataset:
        """Returns the evaluation examples, once and in order.

        Args:
            batch_size: examples in a batch; the last may have fewer.
            transform: as in `train_input_fn`.

        Returns:
            A data set as that of `train_input_fn`, but finite.
        """
        schema = self.schema

        def example(records: tf.Tensor) -> tuple[Any, tf.Tensor]:
            features, label = self._example(schema, records)
            return (transform(features) if transform else features), label

        return (
            self._records("eval")
            .batch(batch_size)
            .map(example, num_parallel_calls=tf.data.AUTOTUNE)
            .prefetch(tf.data.AUTOTUNE)
        )

    def _example(
        self, schema: Schema, records: tf.Tensor
    ) -> tuple[Features, tf.Tensor]:
        features, label = self._parse(
            records, {c.name: c.kind for c in schema.columns}
        )
        label = label[:, tf.newaxis]
        label = tf.reduce_any(label == schema.positive, -1, keepdims=True)
        return features, tf.cast(label, tf.float32)

    def _records(self, split: str) -> tf.data.Dataset:
        """Returns all serialized records, in order."""
        return tf.data.Dataset.from_tensor_slices(
            _columns(self._shards(split))
        ).flat_map(self._read)

    @abc.abstractmethod
    def _scan(self) -> Schema:
        """Reads and checks the data; called once, before all that follow."""

    @abc.abstractmethod
    def _shards(self, split: str) -> Sequence[Shard]:
        """Returns the shards of "train" or "eval" that hold a record."""

    @abc.abstractmethod
    def _read(
        self, path: tf.Tensor, skip: tf.Tensor, take: tf.Tensor
    ) -> tf.data.Dataset:
        """Returns the serialized records of a shard."""

    @abc.abstractmethod
    def _parse(
        self, records: tf.Tensor, kinds: Mapping[str, str]
    ) -> tuple[Features, tf.Tensor]:
        """Returns the columns in `kinds`, and the label as strings."""


def _columns(
    shards: Sequence[Shard],
) -> tuple[list[str], np.ndarray, np.ndarray]:
    return (
        [shard.path for shard in shards],
        np.array([shard.skip for shard in shards], np.int64),
        np.array([shard.take for shard in shards], np.int64),
    )


class Statistics:
    """Gathers a `Schema`, batch by batch.

    Args:
        kinds: "numeric" or "categorical" for each column.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = dict(kinds)
        self._numbers = collections.defaultdict(list)
        self._counts = collections.defaultdict(collections.Counter)
        self.labels = collections.Counter()

    def add(self, features: Features, labels: tf.Tensor) -> None:
        """Adds a batch."""
        self.labels.update(_count(labels))
        for name, kind in self._kinds.items():
            if kind == NUMERIC:
                values = features[name].numpy()
                self._numbers[name].append(values[np.isfinite(values)])
            else:
                self._counts[name].update(_count(features[name]))

    def schema(self, label: str) -> Schema:
        """Returns the schema of all batches added.

        Raises:
            ValueError: if the label is neither 0/1 nor one of two strings, or
                if there is no column.
        """
        if not self._kinds:
            raise ValueError(
                f"Expected at least one column beside the label {label!r}."
            )
        return Schema(
            columns=tuple(
                self._numeric(name) if kind == NUMERIC else self._strings(name)
                for name, kind in self._kinds.items()
            ),
            label=label,
            positive=_positive(label, list(self.labels)),
            num_train=self.labels.total(),
        )

    def _numeric(self, name: str) -> Column:
        values = np.concatenate(self._numbers[name])
        if not len(values):
            return Column(name, NUMERIC)
        return Column(
            name,
            NUMERIC,
            mean=float(values.mean(dtype=np.float64)),
            stddev=float(values.std(dtype=np.float64)) or 1.0,
            boundaries=_quantiles(values),
        )

    def _strings(self, name: str) -> Column:
        counts = self._counts[name]
        counts.pop(b"", None)
        if len(counts) > MAX_VOCABULARY:
            # A power of two, so that a little more data changes nothing.
            return Column(
                name, CATEGORICAL, num_buckets=1 << len(counts).bit_length()
            )
        frequent = sorted(counts, key=lambda value: (-counts[value], value))
        try:
            vocabulary = tuple(value.decode() for value in frequent)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"Column {name!r} must be UTF-8. Received: {error.object!r}."
            ) from None
        return Column(name, CATEGORICAL, vocabulary=vocabulary)


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    """Returns where to cut numbers into buckets of about equal count.

    The most frequent value is left out of the count: a column of zeros with a
    few exceptions is cut where the exceptions are.
    """
    distinct, counts = np.unique(values, return_counts=True)
    most_frequent = distinct[counts.argmax()]
    others = values[values != most_frequent]
    if not len(others):
        return ()
    cuts = np.quantile(
        others, np.linspace(0, 1, NUM_QUANTILES)[1:-1], method="nearest"
    )
    return tuple(np.unique([*cuts, most_frequent]).tolist())


def _count(values: tf.Tensor) -> dict[bytes, int]:
    return pd.Series(values.numpy(), dtype=object).value_counts().to_dict()


def _positive(label: str, values: Sequence[bytes]) -> tuple[str, ...]:
    """Returns the values of a label column that stand for 1."""
    texts = sorted(value.decode(errors="replace") for value in values)
    numbers = {text: _number(text) for text in texts}
    if set(numbers.values()) == {0.0, 1.0}:
        return tuple(text for text in texts if numbers[text] == 1.0)
    if len(texts) == 2 and None in numbers.values():
        return (texts[-1],)
    shown = ", ".join(map(repr, texts[:10])) + (", ..." * (len(texts) > 10))
    raise ValueError(
        f"Label column {label!r} must hold 0 and 1, or exactly two strings "
        f"(the one that sorts last is the positive one). Received "
        f"{len(texts)} distinct values: {shown}."
    )


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
