"""Images: a convolutional network, trained by all-reduce on several workers.

The data are noisy drawings of four shapes, in random sizes and positions. All
processes train one model synchronously: each computes the gradients of its part
of every batch, and all apply the mean.
"""

import argparse

import keras
import numpy as np
from keras import layers

import tfdist

SHAPES, SIDE = ("disc", "ring", "square", "cross"), 24
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--model_dir", default="runs/images")
args = parser.parse_args()


def drawings(size, seed):
    """Images of (24, 24, 1) and their labels."""
    rng = np.random.default_rng(seed)
    shape = rng.integers(len(SHAPES), size=size)
    radius = rng.uniform(4, 9, [size, 1, 1])
    centre = rng.uniform(9, SIDE - 9, [2, size, 1, 1])
    x, y = np.abs(np.mgrid[:SIDE, :SIDE][:, None] - centre)
    disc, square = np.hypot(x, y) < radius, np.maximum(x, y) < radius
    ring = disc & (np.hypot(x, y) > radius - 2)
    cross = square & (np.minimum(x, y) < 1.5)
    drawn = np.stack([disc, ring, square, cross])[shape, np.arange(size)]
    noisy = drawn + rng.normal(0, 0.5, drawn.shape)
    return noisy[..., None].astype("float32"), shape


def model_fn():
    model = keras.Sequential(
        [
            keras.Input([SIDE, SIDE, 1]),
            layers.RandomFlip(),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(len(SHAPES), "softmax"),
        ]
    )
    model.compile(
        "adam", "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


test = drawings(1_000, seed=2)
model, _ = tfdist.fit(
    model_fn,
    drawings(8_000, seed=1),
    validation_data=test,
    epochs=args.epochs,
    batch_size=64,
    model_dir=args.model_dir,
)
if tfdist.Cluster.from_env().is_chief:  # All processes have the model.
    print(model.evaluate(*test, verbose=0, return_dict=True))
    model.save(f"{args.model_dir}/model.keras")
