"""Columns from what Keras offers now: preprocessing layers, `FeatureSpace`.

    job = feature_column("job", string_lookup)      # adapted to the data
    tf.feature_column.embedding_column(job, 8)      # for the deep part

What a layer learned from the data (vocabulary, boundaries, mean) is copied
into the column as constants, so no step asks a variable or table of the
chief.
"""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfdist.canned.feature_columns import Column

fc = tf.feature_column
layers = keras.layers


def feature_column(
    key: str, layer: keras.layers.Layer, dtype: tf.DType | str = "string"
) -> Column:
    """The column that makes of a feature what a preprocessing layer does.

    >>> layer = keras.layers.Discretization([0.0, 1.0])
    >>> feature_column("size", layer).boundaries
    (0.0, 1.0)

    Which id a word gets may differ: it is first a word of the vocabulary, then
    one of those for others. Output modes are left to `indicator_column` and
    `embedding_column`.

    Args:
        key: Name of the feature.
        layer: `StringLookup`, `IntegerLookup`, `Hashing`, `Discretization`
            (these make a categorical column), `Normalization` or `Rescaling`
            (a numeric one); adapted, if it is of a kind that is.
        dtype: Of the feature, for `Hashing`: string or an integer.

    Returns:
        A column of `tf.feature_column`.

    Raises:
        TypeError: another layer.
        ValueError: a layer that is not adapted, or has an option without
            counterpart: salt, a mask, or `invert`.
    """
    for kind, made in _MAKERS.items():
        if isinstance(layer, kind):
            return made(key, layer, tf.as_dtype(dtype))
    names = ", ".join(kind.__name__ for kind in _MAKERS)
    raise TypeError(
        f"Argument `layer` must be one of {names}. Received: layer={layer!r}."
    )


def feature_columns_of(
    feature_space: keras.utils.FeatureSpace,
) -> dict[str, Column]:
    """The columns of an adapted `keras.utils.FeatureSpace`, with its crosses.

    Args:
        feature_space: Adapted.

    Returns:
        Name of the feature, or `<a>_X_<b>` of a cross, to column. All of them
        suit a linear model; a network takes the categorical ones through
        `embedding_column` or `indicator_column`.

    Raises:
        TypeError: a feature with a layer that `feature_column` does not take.
        ValueError: as `feature_column`.
    """
    columns = {
        name: feature_column(name, feature.preprocessor, feature.dtype)
        for name, feature in feature_space.features.items()
    }
    for cross in feature_space.crosses:
        keys = [
            name
            if feature_space.features[name].dtype == "string"
            else columns[name]
            for name in cross.feature_names
        ]
        columns[cross.name] = fc.crossed_column(keys, cross.crossing_dim)
    return columns


def _lookup(
    key: str, layer: layers.StringLookup | layers.IntegerLookup, _: tf.DType
) -> Column:
    missing = "" if isinstance(layer, layers.StringLookup) else -1
    _refuse(key, layer, "mask_token", (None, missing))
    _refuse(key, layer, "invert", (False,))
    words = layer.get_vocabulary(include_special_tokens=False)
    if not len(words):
        raise ValueError(f"The layer of feature {key!r} is not adapted.")
    if missing == "":
        words = [str(word) for word in words]
        dtype = tf.string
    else:
        words = [int(word) for word in words]
        dtype = tf.int64
    return fc.categorical_column_with_vocabulary_list(
        key, words, dtype, num_oov_buckets=layer.num_oov_indices
    )


def _hashing(key: str, layer: layers.Hashing, dtype: tf.DType) -> Column:
    _refuse(key, layer, "salt", (None,))
    _refuse(key, layer, "mask_value", (None,))
    return fc.categorical_column_with_hash_bucket(
        key, layer.num_bins, tf.string if dtype == tf.string else tf.int64
    )


def _discretization(
    key: str, layer: layers.Discretization, _: tf.DType
) -> Column:
    if layer.bin_boundaries is None:
        raise ValueError(f"The layer of feature {key!r} is not adapted.")
    boundaries = [float(boundary) for boundary in layer.bin_boundaries]
    return fc.bucketized_column(fc.numeric_column(key), boundaries)


def _normalization(
    key: str, layer: layers.Normalization, _: tf.DType
) -> Column:
    _refuse(key, layer, "invert", (False,))
    if layer.mean is None:
        raise ValueError(f"The layer of feature {key!r} is not adapted.")
    mean = np.ravel(layer.mean)
    stddev = np.sqrt(np.ravel(layer.variance))
    stddev = np.maximum(stddev, keras.config.epsilon())
    return _scaled(key, mean.size, lambda v: (v - mean) / stddev)


def _rescaling(key: str, layer: layers.Rescaling, _: tf.DType) -> Column:
    scale = np.ravel(layer.scale).astype("float32")
    offset = np.ravel(layer.offset).astype("float32")
    size = max(scale.size, offset.size)
    return _scaled(key, size, lambda v: v * scale + offset)


def _scaled(key: str, size: int, function: Callable) -> Column:
    return fc.numeric_column(
        key,
        shape=(size,),
        normalizer_fn=lambda v: function(tf.cast(v, tf.float32)),
    )


def _refuse(
    key: str, layer: keras.layers.Layer, option: str, plain: tuple
) -> None:
    value = getattr(layer, option)
    if value not in plain:
        raise ValueError(
            f"The {type(layer).__name__} of feature {key!r} has "
            f"{option}={value!r}; a column can only have {plain[-1]!r}."
        )


_MAKERS = {
    layers.StringLookup: _lookup,
    layers.IntegerLookup: _lookup,
    layers.Hashing: _hashing,
    layers.Discretization: _discretization,
    layers.Normalization: _normalization,
    layers.Rescaling: _rescaling,
}
