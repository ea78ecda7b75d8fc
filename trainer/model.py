"""A wide-and-deep model for any table, built from its `Schema`.

The input pipeline maps strings to ids with the model `preprocessor`; the
trained model sees only numbers and ids. `serving_model` combines the two models
into one that accepts the raw columns.

    raw columns -> preprocessor -> ids, numbers -> build -> probability

The wide part memorizes: it is a logistic regression over ids, with one weight
for every value of a column, every bucket of a number, and every pair of values
in a cross. The deep part generalizes: it is a network over embeddings of the
same values. See Cheng et al., 2016, "Wide & Deep Learning for Recommender
Systems".
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist.canned.vocabulary import Vocabulary
from trainer.source import CATEGORICAL, NUMERIC, Column, Schema

# The id of missing values in every column; see `num_ids` for the other ids.
_MISSING = 0
CROSS_BUCKETS = 10_000
# Numbers are clipped at this many standard deviations.
_CLIP = 5.0

Cross = tuple[str, str]


def num_ids(column: Column) -> int:
    """Returns the number of ids of a column.

    Id 0 stands for a missing value. With a vocabulary, id 1 stands for unknown
    values, and each word has an id; a hashed column has an id for each bucket,
    a numeric column an id for each interval between its boundaries.
    """
    if column.kind != CATEGORICAL:
        return 1 + len(column.boundaries) + 1
    return 1 + (column.num_buckets or 1 + len(column.vocabulary))


def default_crosses(schema: Schema) -> tuple[Cross, ...]:
    """Returns all pairs of the first four columns that have a vocabulary."""
    names = [c.name for c in schema.categorical if c.vocabulary]
    return tuple(itertools.combinations(names[:4], 2))


class Preprocess(keras.layers.Layer):
    """Turns raw columns into ids and normalized numbers.

    The layer has no variables and no lookup tables (such as that of
    `keras.layers.StringLookup`), which would live on one machine of the
    cluster, while input pipelines run on others. Its state consists of
    constants of the graph, which an export contains as well.

    Call arguments: a dictionary of vectors `(batch,)`: float32 for numeric
    columns (NaN and infinity are missing), string for categorical columns (""
    and "?" are missing). A missing value has an id of its own, and a missing
    number is replaced by the mean. Unknown strings share an id with rare ones,
    or a hash bucket with others. Numbers beyond the range of the training data
    are in the first or last bucket, and clipped at 5 standard deviations.

    Returns: a dictionary of

    - "wide": int32 `(batch, columns + crosses)`, rows of one table of weights;
    - "deep_<column>": int32 `(batch,)`, rows of the column's embedding;
    - "numeric": float32 `(batch, numeric columns)`, absent without any.
    """

    def __init__(
        self, schema: Schema, crosses: Sequence[Cross], *, name: str
    ) -> None:
        super().__init__(name=name)
        self._schema = schema
        self._crosses = tuple(crosses)

    def call(self, inputs: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Preprocesses a batch."""
        sizes = {c.name: num_ids(c) for c in self._schema.columns}
        ids = {c.name: _ids(c, inputs[c.name]) for c in self._schema.columns}
        wide = list(ids.values())
        for a, b in self._crosses:
            pair = tf.cast(ids[a], tf.int64) * sizes[b]
            pair += tf.cast(ids[b], tf.int64)
            if sizes[a] * sizes[b] > CROSS_BUCKETS:
                text = tf.strings.as_string(pair)
                pair = tf.strings.to_hash_bucket_fast(text, CROSS_BUCKETS)
            wide.append(tf.cast(pair, tf.int32))
        rows = _wide_sizes(self._schema, self._crosses)
        offsets = np.cumsum([0, *rows[:-1]]).astype("int32")
        outputs = {"wide": tf.stack(wide, axis=1) + offsets}
        outputs |= {_deep(name): column for name, column in ids.items()}
        if numeric := self._schema.numeric:
            scaled = [_normalized(c, inputs[c.name]) for c in numeric]
            outputs["numeric"] = tf.stack(scaled, axis=1)
        return outputs


def _ids(column: Column, values: tf.Tensor) -> tf.Tensor:
    """Returns the int32 id of each value; see `num_ids`."""
    if column.kind != CATEGORICAL:
        boundaries = tf.constant(column.boundaries, tf.float32)
        ids = 1 + tf.searchsorted(boundaries, values, side="right")
        missing = ~tf.math.is_finite(values)
    else:
        missing = (values == "") | (values == "?")
        if column.num_buckets:
            ids = 1 + tf.strings.to_hash_bucket_fast(values, column.num_buckets)
        elif column.vocabulary:
            ids = 2 + Vocabulary(column.vocabulary).ids(values)
        else:
            ids = tf.ones_like(values, tf.int32)
    return tf.where(missing, _MISSING, tf.cast(ids, tf.int32))


def _normalized(column: Column, values: tf.Tensor) -> tf.Tensor:
    scaled = (values - column.mean) / column.stddev
    scaled = tf.clip_by_value(scaled, -_CLIP, _CLIP)
    return tf.where(tf.math.is_finite(values), scaled, 0.0)


def _wide_sizes(schema: Schema, crosses: Sequence[Cross]) -> list[int]:
    sizes = {c.name: num_ids(c) for c in schema.columns}
    pairs = [min(sizes[a] * sizes[b], CROSS_BUCKETS) for a, b in crosses]
    return [*sizes.values(), *pairs]


def _deep(name: str) -> str:
    return f"deep_{name}"


def preprocessor(
    schema: Schema, crosses: Sequence[Cross] | None = None
) -> keras.Model:
    """Returns the model from raw columns to the inputs of `build`'s model.

    Args:
        schema: schema of the raw columns.
        crosses: pairs of column names; `default_crosses` if omitted. They must
            be the same for `preprocessor`, `build` and `serving_model`.
    """
    if crosses is None:
        crosses = default_crosses(schema)
    inputs = _raw_inputs(schema)
    outputs = Preprocess(schema, crosses, name="preprocess")(inputs)
    return keras.Model(inputs, outputs, name="preprocessor")


def _raw_inputs(schema: Schema) -> dict[str, keras.KerasTensor]:
    dtypes = {NUMERIC: "float32", CATEGORICAL: "string"}
    return {
        c.name: keras.Input((), dtype=dtypes[c.kind], name=c.name)
        for c in schema.columns
    }


def embedding(
    num_rows: int, dim: int, name: str, initializer: str = "uniform"
) -> keras.layers.Layer:
    """Returns an embedding layer; all tables of the model are created here."""
    return tfdist.PartitionedEmbedding(
        num_rows, dim, embeddings_initializer=initializer, name=name
    )


def build(
    schema: Schema,
    *,
    crosses: Sequence[Cross] | None = None,
    optimizer: keras.optimizers.Optimizer | str | None = None,
    hidden_units: Sequence[int] = (64, 32),
    embedding_dim: int = 8,
) -> keras.Model:
    """Returns the compiled wide-and-deep model.

    Args:
        schema: schema of the raw columns.
        crosses: as in `preprocessor`.
        optimizer: Adagrad with a rate of 0.15 if omitted, which tolerates the
            stale gradients of asynchronous training better than Adam.
        hidden_units: sizes of the hidden layers of the deep part.
        embedding_dim: size of the embedding vectors.

    Returns:
        A model from the outputs of `preprocessor` to the probability of the
        positive label, shape `(batch, 1)`. Only the paths of variables in the
        wide part start with "wide".
    """
    if crosses is None:
        crosses = default_crosses(schema)
    sizes = _wide_sizes(schema, crosses)
    inputs = {"wide": keras.Input((len(sizes),), dtype="int32", name="wide")}
    tables = {}
    for column in schema.columns:
        key = _deep(column.name)
        inputs[key] = keras.Input((), dtype="int32", name=key)
        tables[key] = embedding(
            num_ids(column), embedding_dim, f"embedding_{column.name}"
        )

    weights = embedding(sum(sizes), 1, "wide_weights", "zeros")(inputs["wide"])
    wide = keras.ops.sum(weights, axis=1)
    deep = [table(inputs[key]) for key, table in tables.items()]
    if schema.numeric:
        numeric = keras.Input((len(schema.numeric),), name="numeric")
        inputs["numeric"] = numeric
        wide += keras.layers.Dense(1, use_bias=False, name="wide_numeric")(
            numeric
        )
        deep.append(numeric)
    deep = keras.ops.concatenate(deep, axis=-1)
    for i, units in enumerate(hidden_units):
        deep = keras.layers.Dense(units, "relu", name=f"hidden_{i}")(deep)
    logit = wide + keras.layers.Dense(1, name="logit")(deep)

    model = keras.Model(inputs, keras.ops.sigmoid(logit), name="wide_and_deep")
    model.compile(
        optimizer=optimizer or keras.optimizers.Adagrad(0.15),
        loss="binary_crossentropy",
        metrics=[
            keras.metrics.AUC(name="auc"),
            keras.metrics.BinaryAccuracy(name="accuracy"),
        ],
    )
    return model


def serving_model(
    model: keras.Model,
    schema: Schema,
    crosses: Sequence[Cross] | None = None,
) -> keras.Model:
    """Returns a model for export that accepts raw columns.

    `model` is a trained model from `build`, called with the same `schema` and
    `crosses`. The result maps raw columns, by name, to
    `{"probabilities": (batch, 1)}`; `serving_model(...).export(path)` writes a
    SavedModel for TensorFlow Serving.
    """
    inputs = _raw_inputs(schema)
    probabilities = model(preprocessor(schema, crosses)(inputs))
    return keras.Model(inputs, {"probabilities": probabilities}, name="serving")
