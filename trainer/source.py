"""A source of examples: its schema, and the input functions of a job.

A `Source` provides two input functions and a `Schema`. The schema describes the
data that a model is built for: the columns, the distribution of numbers, the
strings that occur. The chief computes the schema in one pass over the training
data and saves it in the directory of the job, so that training, evaluation and
export use the same schema.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import tfdist

NUMERIC = "numeric"
CATEGORICAL = "categorical"

# A categorical column with more values than this is hashed, not looked up.
MAX_VOCABULARY = 1000
# Maximum number of quantile buckets of a numeric column.
NUM_QUANTILES = 20
SHUFFLE_BUFFER = 20_000
SCAN_BATCH = 8192

Features = dict[str, tf.Tensor]
Transform = Callable[[Features], Any]
Parse = Callable[[Features, tf.Tensor], Any]


@dataclasses.dataclass(frozen=True)
class Column:
    """The description of one column.

    Attributes:
        name: the name in the header of the files, changed by `column_name`.
        kind: "numeric" (float32, missing is NaN) or "categorical" (string,
            missing is the empty string).
        mean: mean of the values present in the training data (numeric).
        stddev: their standard deviation, 1 for a constant column (numeric).
        boundaries: ascending inner quantiles (numeric).
        vocabulary: the values that occur often enough in the training data,
            most frequent first; empty if there are more than `MAX_VOCABULARY`
            distinct values (categorical).
        num_buckets: number of hash buckets, 0 with a vocabulary (categorical).
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
        positive: the labels that count as 1: all spellings of 1 if the labels
            are 0 and 1, else the one of two strings that sorts last: ">50K" of
            "<=50K" and ">50K", "yes" of "no" and "yes".
        num_train: number of training examples.
    """

    columns: tuple[Column, ...]
    label: str
    positive: tuple[str, ...]
    num_train: int

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        """Restores a schema from `dataclasses.asdict`, also through JSON."""

        def tuples(fields: Mapping[str, Any]) -> dict[str, Any]:
            pairs = fields.items()
            return {k: tuple(v) if isinstance(v, list) else v for k, v in pairs}

        columns = tuple(Column(**tuples(c)) for c in values["columns"])
        return cls(**{**tuples(values), "columns": columns})

    @property
    def numeric(self) -> tuple[Column, ...]:
        """The numeric columns."""
        return tuple(c for c in self.columns if c.kind == NUMERIC)

    @property
    def categorical(self) -> tuple[Column, ...]:
        """The categorical columns."""
        return tuple(c for c in self.columns if c.kind == CATEGORICAL)


def column_name(text: str) -> str:
    """Returns a name that TensorFlow accepts for an input of a model.

    >>> column_name("hours per week"), column_name("_id")
    ('hours_per_week', 'id')
    """
    return re.sub(r"[^A-Za-z0-9_]", "_", text.strip()).lstrip("_")


class Source(abc.ABC):
    """Training and evaluation examples with one schema.

    Attributes:
        description: one line for reports.
        best_auc: the best AUC that any model can reach on the evaluation
            examples; None if unknown.
    """

    description: str = ""
    best_auc: float | None = None
    _label: str
    _path = ""  # The file of the job's schema.

    def __init__(
        self, arguments: Mapping[str, Any], **columns: Sequence[str]
    ) -> None:
        """Stores the arguments that determine the schema.

        `columns` maps a kind, or "ignore", to names of columns.
        """
        named = {k: {*map(column_name, names)} for k, names in columns.items()}
        self._overrides = named
        lists = {kind: sorted(names) for kind, names in named.items()}
        self._arguments = {**arguments, **lists}
        for one, other in itertools.combinations(named, 2):
            if both := sorted(named[one] & named[other]):
                raise ValueError(
                    f"Arguments `{one}_columns` and `{other}_columns` must not "
                    f"name the same column. Received in both: {both[0]!r}."
                )

    def _check_overrides(self, inputs: Collection[str]) -> None:
        """Raises `ValueError` if an argument names a column not in `inputs`."""
        for kind, names in self._overrides.items():
            for name in sorted(names.difference(inputs)):
                raise ValueError(
                    f"Argument `{kind}_columns` must name columns of "
                    f"{self.description} other than the label: "
                    f"{listed(inputs)}. Received: {name!r}."
                )

    def share_schema(self, path: str, cluster: tfdist.Cluster) -> None:
        """Shares the schema among all tasks and runs of a job.

        The chief writes it to the file `path` in the first run.
        """
        self._path, self._cluster = path, cluster

    @functools.cached_property
    def schema(self) -> Schema:
        """The schema, from one pass over the training examples.

        Raises:
            FileNotFoundError: there are no files.
            TimeoutError: the chief did not share the schema in time.
            ValueError: the data is invalid (the message names the file and the
                line), or the job's schema was computed for other arguments.
        """
        # The first access may happen while a function is being traced.
        with tf.init_scope():
            try:
                return self._of_job() if self._path else self._scan()
            except tf.errors.InvalidArgumentError as error:
                # The reader's own message, without TensorFlow's additions.
                pattern = r"assertion failed: \[(.*?)\]\s*\[\["
                found = re.search(pattern, error.message, re.S)
                raise ValueError(found[1] if found else error.message) from None

    def _of_job(self) -> Schema:
        def compute() -> dict[str, Any]:
            return {
                "arguments": self._arguments,
                "schema": dataclasses.asdict(self._scan()),
                "data": self._found(),
            }

        saved = tfdist.compute_once(self._path, compute, cluster=self._cluster)
        if saved["arguments"] != self._arguments:
            raise ValueError(
                f"{self._path} holds the columns for {saved['arguments']}. "
                f"Received: {self._arguments}. Use the same arguments, or "
                "another model_dir."
            )
        schema = Schema.from_dict(saved["schema"])
        self._check_new(schema, saved["data"])
        return schema

    def _scan(self) -> Schema:
        """Reads all training examples."""
        kinds = self._infer_kinds()
        label, min_count = self._label, self._arguments["min_count"]
        if not kinds:
            raise ValueError(
                f"Expected at least one column other than {label!r}."
            )
        statistics = tfdist.FeatureStatistics()
        for features, labels in self._once("train", kinds):
            statistics.add({**features, label: labels})
        if not statistics:
            raise ValueError(
                f"{self.description}: expected at least one example. "
                "Received: none."
            )
        self._check(kinds, statistics)
        return Schema(
            columns=tuple(
                _numeric(name, statistics[name])
                if kind == NUMERIC
                else _categorical(name, statistics[name], min_count)
                for name, kind in kinds.items()
            ),
            label=label,
            positive=positive_labels(label, statistics[label].counts),
            num_train=statistics[label].counts.total(),
        )

    def train_input_fn(
        self,
        input_context: tf.distribute.InputContext | None = None,
        *,
        batch_size: int = 128,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> tf.data.Dataset:
        """Returns one worker's training examples, shuffled and repeated.

        The examples are sharded among workers as in `tfdist.read_csv`.

        Args:
            input_context: identifies the worker; None if it is the only one.
            batch_size: examples in a batch; every batch is full.
            transform: maps the features of a batch, for example
                `model.preprocessor(schema)`.
            seed: seed for shuffling.

        Returns:
            A dataset of `(features, label)`: a dictionary of vectors of
            `batch_size` (or what `transform` makes of it) and a float32 tensor
            `(batch_size, 1)`.
        """
        workers = input_context.num_input_pipelines if input_context else 1
        if self.schema.num_train < workers:
            raise ValueError(
                "Every worker needs at least one example. Received: "
                f"{self.schema.num_train} examples for {workers} workers."
            )
        return self._batches(
            "train",
            batch_size,
            self._kinds(self.schema),
            self._example(transform),
            context=input_context,
            seed=seed,
            shuffle_buffer_size=SHUFFLE_BUFFER,
        )

    def eval_input_fn(
        self, *, batch_size: int = 1024, transform: Transform | None = None
    ) -> tf.data.Dataset:
        """Returns the evaluation examples, once and in order.

        Like `train_input_fn`, but the dataset is finite, and its last batch may
        be smaller.
        """
        kinds, example = self._kinds(self.schema), self._example(transform)
        return self._once("eval", kinds, example, batch_size)

    def _example(self, transform: Transform | None) -> Parse:
        positive = self.schema.positive

        def example(features: Features, label: tf.Tensor) -> Any:
            label = label[:, tf.newaxis]
            label = tf.reduce_any(label == positive, -1, keepdims=True)
            features = transform(features) if transform else features
            return features, tf.cast(label, tf.float32)

        return example

    @staticmethod
    def _kinds(schema: Schema) -> dict[str, str]:
        return {column.name: column.kind for column in schema.columns}

    def _once(
        self,
        split: str,
        kinds: Mapping[str, str],
        transform: Parse = lambda *example: example,
        batch_size: int = SCAN_BATCH,
        **options: Any,
    ) -> tf.data.Dataset:
        options |= {"shuffle": False, "num_epochs": 1}
        return self._batches(split, batch_size, kinds, transform, **options)

    def _check(
        self, kinds: Mapping[str, str], statistics: tfdist.FeatureStatistics
    ) -> None:
        """Checks the results of `_scan`, and the data it has not read."""
        del kinds, statistics

    def _found(self) -> dict[str, Any]:
        """Returns further results of `_scan` to save as JSON."""
        return {}

    def _check_new(self, schema: Schema, found: Mapping[str, Any]) -> None:
        """Checks data that another run's `_scan` has not seen."""
        del schema, found

    @abc.abstractmethod
    def _infer_kinds(self) -> dict[str, str]:
        """Returns the kind of each column that the model sees."""

    @abc.abstractmethod
    def _batches(
        self,
        split: str,
        batch_size: int,
        kinds: Mapping[str, str],
        transform: Parse,
        **options: Any,
    ) -> tf.data.Dataset:
        """Returns batches of the split "train" or "eval".

        `transform` maps the columns in `kinds` and the label, as strings, to
        elements of the dataset; `options` are those of `tfdist.ReadOptions`.
        """


def _numeric(name: str, numbers: Any) -> Column:
    return Column(
        name,
        NUMERIC,
        mean=numbers.mean,
        stddev=numbers.variance**0.5 or 1.0,
        boundaries=tuple(numbers.boundaries(NUM_QUANTILES)),
    )


def _categorical(name: str, strings: Any, min_count: int) -> Column:
    distinct = len(strings.counts)
    if distinct > MAX_VOCABULARY:
        # A power of two, so that slightly more data does not change it.
        return Column(name, CATEGORICAL, num_buckets=1 << distinct.bit_length())
    try:
        vocabulary = tuple(strings.vocabulary(min_count=min_count))
    except ValueError as error:
        raise ValueError(f"Column {name!r}: {error}") from None
    return Column(name, CATEGORICAL, vocabulary=vocabulary)


def positive_labels(label: str, values: Iterable[bytes]) -> tuple[str, ...]:
    """Returns the values of a label column that stand for 1."""
    try:
        texts = sorted(value.decode() for value in values)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"Label column {label!r} must be UTF-8. Received: {error.object!r}."
        ) from None
    numbers = {text: _number(text) for text in texts}
    if set(numbers.values()) == {0.0, 1.0}:
        return tuple(text for text in texts if numbers[text] == 1.0)
    if len(texts) == 2 and None in numbers.values():
        return (texts[-1],)
    shown = listed(texts[:10]) + ", ..." * (len(texts) > 10)
    raise ValueError(
        f"Label column {label!r} must hold 0 and 1, or exactly two strings "
        f"(the one that sorts last is the positive one). Received "
        f"{len(texts)} distinct values: {shown}."
    )


def listed(names: Iterable[str]) -> str:
    """Returns names formatted for a message."""
    return ", ".join(map(repr, names))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
