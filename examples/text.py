"""Text: a small transformer that classifies reviews.

"the plot was not dull but the cast was weak" is negative: the part after "but"
decides, and "not" negates a word. A bag of words cannot tell the difference.
"""

import argparse

import keras
import numpy as np
from keras import layers, ops

import tfdist

LENGTH, WIDTH, HEADS = 12, 32, 4
WORDS = (["dull", "weak", "silly", "long"], ["fresh", "deep", "witty", "warm"])
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--model_dir", default="runs/text")
args = parser.parse_args()


def clause(rng):
    """A statement, and whether it is positive."""
    good, turned = rng.integers(2, size=2)
    noun = rng.choice(["plot", "cast", "music", "end"])
    verb = "was not" if turned else "was"
    return f"the {noun} {verb} {rng.choice(WORDS[good])}", good != turned


def reviews(size, seed):
    """Texts, and whether each is positive."""
    rng = np.random.default_rng(seed)
    pairs = [(clause(rng), clause(rng)) for _ in range(size)]
    texts = [f"{first} but {last}" for (first, _), (last, _) in pairs]
    return np.array(texts, object), np.array([good for _, (_, good) in pairs])


def encoder(x):
    """Attention and a feed-forward layer, each with a residual connection."""
    attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
    x = layers.LayerNormalization()(x + attention(x, x))
    hidden = layers.Dense(2 * WIDTH, "relu")(x)
    return layers.LayerNormalization()(x + layers.Dense(WIDTH)(hidden))


def model_of(texts):
    """A model from raw texts to the probability of a positive review."""
    text = keras.Input([], dtype="string", name="text")
    vectorize = layers.TextVectorization(output_sequence_length=LENGTH)
    vectorize.adapt(texts)
    words = vectorize(text)
    positions = ops.cumsum(ops.ones_like(words), axis=1) - 1
    x = layers.Embedding(vectorize.vocabulary_size(), WIDTH)(words)
    x = encoder(x + layers.Embedding(LENGTH, WIDTH)(positions))
    x = layers.GlobalAveragePooling1D()(x)
    model = keras.Model(text, layers.Dense(1, "sigmoid")(x))
    optimizer = keras.optimizers.Adam(0.003)
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy"])
    return model


train, test = reviews(8_000, seed=1), reviews(1_000, seed=2)
model, _ = tfdist.fit(
    lambda: model_of(train[0]),
    train,
    validation_data=test,
    epochs=args.epochs,
    batch_size=64,
    model_dir=args.model_dir,
)
if tfdist.Cluster.from_env().is_chief:  # Other tasks may have no model.
    print(model.evaluate(*test, verbose=0, return_dict=True))
    model.export(f"{args.model_dir}/export", verbose=False)
