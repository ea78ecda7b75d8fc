"""A source of examples: its schema, and the input functions of a job.

A `Source` gives two input functions and a `Schema`. The schema is what a model
has to know before it sees an example: the columns, how their numbers are
spread, which strings occur. It costs one pass over the training data, made by
the chief when it first needs it, and is kept in the directory of the job: what
was trained on it, the evaluator and the export never see another.

The training data set is that of `tfdist.data.reading`: whatever the source, a
share for each worker, shuffled, parsed many records at a time.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfdist.cluster.spec import Cluster
from tfdist.data.statistics import (
    FeatureStatistics,
    NumberStatistics,
    StringStatistics,
    compute_once,
)

NUMERIC = "numeric"
CATEGORICAL = "categorical"

# A categorical column with more values than this is hashed, not looked up.
MAX_VOCABULARY = 1000
# Buckets of equal count that a numeric column is cut into, at most.
NUM_QUANTILES = 20
SHUFFLE_BUFFER = 20_000

Features = dict[str, tf.Tensor]
Transform = Callable[[Features], Any]
Parse = Callable[[Features, tf.Tensor], Any]


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
        vocabulary: the values seen often enough in training, the most
            frequent first, or empty where more than `MAX_VOCABULARY` were seen
            (categorical).
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

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Schema:
        """What `dataclasses.asdict` gives, also if it was JSON meanwhile."""
        columns = (
            {k: tuple(v) if isinstance(v, list) else v for k, v in c.items()}
            for c in values["columns"]
        )
        return cls(
            tuple(Column(**column) for column in columns),
            values["label"],
            tuple(values["positive"]),
            values["num_train"],
        )

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
        description: one line for people.
        best_auc: the best AUC that any model can reach on the evaluation
            examples, None where nobody knows.
    """

    description: str = ""
    best_auc: float | None = None
    _shared: Callable[[Callable[[], Any]], Any] | None = None

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        """Stores what decides on the schema, beside the data."""
        self._arguments = dict(arguments)

    def share_schema(self, path: str, cluster: Cluster) -> None:
        """Makes the schema that of a job, for all its tasks and runs.

        Args:
            path: of the file that the chief writes, in the first run.
            cluster: which task this is.
        """
        self._shared = functools.partial(compute_once, path, cluster=cluster)
        self._shared_path = path

    @functools.cached_property
    def schema(self) -> Schema:
        """The schema, from one pass over the training examples.

        Raises:
            FileNotFoundError: if there are no files.
            TimeoutError: if the chief does not come to share it.
            ValueError: if anything in them is not as it must be. The message
                names the file, the line, and what was expected. Or if the
                schema of the job was made for other arguments.
        """
        # Also when the first to ask is a function that is being traced.
        with tf.init_scope():
            if self._shared is None:
                return self._scan()
            saved = self._shared(
                lambda: {
                    "arguments": self._arguments,
                    "schema": dataclasses.asdict(self._scan()),
                    "data": self._found(),
                }
            )
            if saved["arguments"] != self._arguments:
                raise ValueError(
                    f"{self._shared_path} holds the columns for "
                    f"{saved['arguments']}. Received: {self._arguments}. Give "
                    "the same, or train in another model_dir."
                )
            schema = Schema.from_dict(saved["schema"])
            self._adopt(schema, saved["data"])
        return schema

    def train_input_fn(
        self,
        input_context: tf.distribute.InputContext | None = None,
        *,
        batch_size: int = 128,
        transform: Transform | None = None,
        seed: int = 0,
    ) -> tf.data.Dataset:
        """Returns the training examples of one worker, shuffled, for ever.

        In each pass, each of the `input_context.num_input_pipelines` workers
        reads other examples than its neighbours, and others than in the pass
        before: whole files if there are enough of them, else every n-th
        record; and it shuffles with a seed of its own. May be called inside a
        `tf.function`, where `input_pipeline_id` is a tensor.

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
        workers = input_context.num_input_pipelines if input_context else 1
        if self.schema.num_train < workers:
            raise ValueError(
                "Every worker needs an example of its own. Received: "
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

        Args:
            batch_size: examples in a batch; the last may have fewer.
            transform: as in `train_input_fn`.

        Returns:
            A data set as that of `train_input_fn`, but finite.
        """
        return self._batches(
            "eval",
            batch_size,
            self._kinds(self.schema),
            self._example(transform),
            shuffle=False,
            num_epochs=1,
        )

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

    @abc.abstractmethod
    def _scan(self) -> Schema:
        """Reads and checks the data; called once, before all that follow."""

    def _found(self) -> dict[str, Any]:
        """What `_scan` has found beside the schema, for JSON."""
        return {}

    def _adopt(self, schema: Schema, found: Mapping[str, Any]) -> None:
        """Takes what another `_scan` has found, instead of a scan."""
        del schema, found  # Beside the schema, nothing.

    @abc.abstractmethod
    def _batches(
        self,
        split: str,
        batch_size: int,
        kinds: Mapping[str, str],
        transform: Parse,
        **options: Any,
    ) -> tf.data.Dataset:
        """Batches of "train" or "eval".

        Args:
            split: which of the two.
            batch_size: examples in a batch.
            kinds: the columns to read, and their kinds.
            transform: maps them and the label, as strings, to what the data
                set gives.
            **options: of `tfdist.ReadOptions`.
        """


class Statistics:
    """Gathers a `Schema`, batch by batch.

    Args:
        kinds: "numeric" or "categorical" for each column.
    """

    def __init__(self, kinds: Mapping[str, str]) -> None:
        self._kinds = dict(kinds)
        self._features = FeatureStatistics()
        self.labels = StringStatistics()

    def add(self, features: Features, labels: tf.Tensor) -> None:
        """Adds a batch."""
        self._features.add(features)
        self.labels.add(labels)

    def schema(self, label: str, min_count: int) -> Schema:
        """Returns the schema of all batches added.

        Args:
            label: name of its column.
            min_count: how often a string occurs that a vocabulary holds.

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
                _numeric(name, self._features[name])
                if kind == NUMERIC
                else _categorical(name, self._features[name], min_count)
                for name, kind in self._kinds.items()
            ),
            label=label,
            positive=_positive(label, list(self.labels.counts)),
            num_train=self.labels.counts.total(),
        )


def _numeric(name: str, numbers: NumberStatistics) -> Column:
    return Column(
        name,
        NUMERIC,
        mean=numbers.mean,
        stddev=numbers.variance**0.5 or 1.0,
        boundaries=tuple(numbers.boundaries(NUM_QUANTILES)),
    )


def _categorical(
    name: str, strings: StringStatistics, min_count: int
) -> Column:
    distinct = len(strings.counts)
    if distinct > MAX_VOCABULARY:
        # A power of two, so that a little more data changes nothing.
        return Column(name, CATEGORICAL, num_buckets=1 << distinct.bit_length())
    try:
        vocabulary = tuple(strings.vocabulary(min_count=min_count))
    except ValueError as error:
        raise ValueError(f"Column {name!r}: {error}") from None
    return Column(name, CATEGORICAL, vocabulary=vocabulary)


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
