"""The translator of the 2017 lecture: a deep LSTM with one layer per device.

Both sentences pass through all layers. In each layer the LSTM that reads the
target starts in the final state of the LSTM that reads the source (Sutskever,
Vinyals and Le, 2014, "Sequence to Sequence Learning with Neural Networks"). A
layer therefore depends only on the outputs of the previous layer, and each can
be placed on its own device, as in the paper.

    model = translator.build(num_layers=4, devices=["GPU:0", "GPU:1", ...])
    model.fit(translator.batches(128), steps_per_epoch=1000)
    translator.translate(model, [[3, 1, 4, 1, 5, 9, 2, 6]])

The model learns to reverse a sequence, for which it needs the entire input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tfdist

# The first word of every target; the words of sentences are greater.
START = 0


class Embed(keras.layers.Layer):
    """Embeddings of size `units` for the words of both languages."""

    def __init__(self, vocabulary: int, units: int, name: str) -> None:
        super().__init__(name=name)
        self.source = keras.layers.Embedding(vocabulary, units, name="source")
        self.target = keras.layers.Embedding(vocabulary, units, name="target")

    def build(self, input_shape: Any) -> None:
        """Creates both tables."""
        self.source.build()
        self.target.build()

    def call(self, inputs: dict[str, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        """Maps word ids `(batch, length)` of source and target to vectors."""
        return self.source(inputs["source"]), self.target(inputs["target"])


class Recurrent(keras.layers.Layer):
    """One layer of the encoder and one of the decoder, each with `units`."""

    def __init__(self, units: int, name: str) -> None:
        super().__init__(name=name)
        self.encoder = keras.layers.LSTM(
            units, return_sequences=True, return_state=True, name="encoder"
        )
        self.decoder = keras.layers.LSTM(
            units, return_sequences=True, name="decoder"
        )

    def build(self, input_shape: Any) -> None:
        """Creates the weights of both LSTMs."""
        source, target = input_shape
        self.encoder.build(source)
        self.decoder.build(target)

    def call(
        self, inputs: tuple[tf.Tensor, tf.Tensor]
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Maps vectors `(batch, length, ...)` to `(batch, length, units)`."""
        source, target = inputs
        source, *state = self.encoder(source)
        return source, self.decoder(target, initial_state=state)


class Predict(keras.layers.Layer):
    """Logits of the next word of the target."""

    def __init__(self, vocabulary: int, name: str) -> None:
        super().__init__(name=name)
        self.logits = keras.layers.Dense(vocabulary, name="logits")

    def build(self, input_shape: Any) -> None:
        """Creates the weights."""
        self.logits.build(input_shape[1])

    def call(self, inputs: tuple[tf.Tensor, tf.Tensor]) -> tf.Tensor:
        """Maps outputs of `Recurrent` to `(batch, length, vocabulary)`."""
        return self.logits(inputs[1])


def inputs(length: int) -> dict[str, keras.KerasTensor]:
    """Returns the inputs of the model: sentences of `length` words."""
    return {
        name: keras.Input([length], dtype="int32", name=name)
        for name in ("source", "target")
    }


def stages(
    num_layers: int, units: int, vocabulary: int
) -> list[list[keras.layers.Layer]]:
    """Returns the layers of each device: embeddings first, logits last."""
    layers = [[Recurrent(units, f"layer_{i}")] for i in range(num_layers)]
    layers[0].insert(0, Embed(vocabulary, units, "embed"))
    layers[-1].append(Predict(vocabulary, "predict"))
    return layers


def build(
    num_layers: int = 4,
    *,
    units: int = 64,
    vocabulary: int = 16,
    length: int = 8,
    devices: Sequence[str] | Sequence[Sequence[str]] | None = None,
    num_micro_batches: int = 4,
    optimizer: keras.optimizers.Optimizer | str | None = None,
) -> tfdist.pipeline.Pipeline:
    """Returns the compiled translator.

    Args:
        num_layers: LSTM layers, and stages of the pipeline.
        units: Size of a layer.
        vocabulary: Number of words, `START` among them.
        length: Words in a sentence.
        devices: As for `Pipeline`.
        num_micro_batches: As for `Pipeline`.
        optimizer: Default: Adam with a rate of 0.005.
    """
    model = tfdist.pipeline.Pipeline(
        inputs(length),
        stages(num_layers, units, vocabulary),
        devices,
        num_micro_batches=num_micro_batches,
        name="translator",
    )
    model.compile(
        optimizer or keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def batches(
    batch_size: int, *, vocabulary: int = 16, length: int = 8, seed: int = 0
) -> tf.data.Dataset:
    """Returns an infinite dataset of random sentences and their reverse.

    Returns:
        Elements `({"source", "target"}, labels)`, all int32 `(batch, length)`;
        "target" is `START` followed by all labels but the last.
    """

    def example(seeds: tf.Tensor) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
        source = tf.random.stateless_uniform(
            [batch_size, length], seeds, START + 1, vocabulary, tf.int32
        )
        labels = tf.reverse(source, [1])
        target = tf.pad(labels[:, :-1], [[0, 0], [1, 0]], constant_values=START)
        return {"source": source, "target": target}, labels

    return (
        tf.data.Dataset.random(seed).batch(2, drop_remainder=True).map(example)
    )


def translate(model: keras.Model, source: Any) -> np.ndarray:
    """Decodes greedily: appends the most likely next word in each step.

    Args:
        model: A model from `build`.
        source: Word ids, `(batch, length)`.

    Returns:
        int32 `(batch, length)`.
    """
    source = np.asarray(source, np.int32)
    target = np.full([source.shape[0], source.shape[1] + 1], START, np.int32)
    for i in range(source.shape[1]):
        words = {"source": source, "target": target[:, :-1]}
        logits = model.predict_on_batch(words)
        target[:, i + 1] = np.argmax(logits[:, i], axis=-1)
    return target[:, 1:]
