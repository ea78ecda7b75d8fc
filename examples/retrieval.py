"""Retrieval: a user tower, an item tower, and in-batch negatives.

The model learns to tell a user's purchases from those of other users, without
seeing which of 20 genres each likes. The export returns the ten best items.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import tfdist

NUM_USERS, NUM_ITEMS, NUM_GENRES = 2_000, 1_000, 20
parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--model_dir", default="runs/retrieval")
args = parser.parse_args()


def purchases(size, seed):
    """Users and purchased items, four of five from the genre they like."""
    rng = np.random.default_rng(seed)
    user, item = rng.integers([[NUM_USERS], [NUM_ITEMS]], size=[2, size])
    liked = item - item % NUM_GENRES + user % NUM_GENRES
    item = np.where(rng.random(size) < 0.8, liked, item)
    columns = {"user": user, "item": item}, item
    return tf.data.Dataset.from_tensor_slices(columns)


def train_input_fn(context):
    share = context.num_input_pipelines, context.input_pipeline_id
    data = purchases(100_000, seed=1).shard(*share).shuffle(100_000).repeat()
    return data.batch(context.get_per_replica_batch_size(256))


def loss(item, scores):
    """The diagonal is positive; the same item elsewhere is no negative."""
    own = ops.eye(ops.shape(scores)[0])
    same = ops.cast(ops.equal(item[:, None], item), "float32")
    scores -= 1e9 * (same - own)
    return keras.losses.categorical_crossentropy(own, scores, from_logits=True)


def top_10(item, scores):
    own = ops.eye(ops.shape(scores)[0])
    return keras.metrics.top_k_categorical_accuracy(own, scores, k=10)


def model_fn():
    ids, vectors = {}, {}
    for name, number in (("user", NUM_USERS), ("item", NUM_ITEMS)):
        ids[name] = keras.Input([], dtype="int64", name=name)
        table = tfdist.PartitionedEmbedding(number, 16, num_shards=2)
        parts = [keras.Input([], dtype="int64"), table, layers.Dense(16)]
        vectors[name] = keras.Sequential(parts, name=f"{name}s")(ids[name])
    scores = ops.matmul(vectors["user"], ops.transpose(vectors["item"]))
    model = keras.Model(ids, scores)
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=[top_10])
    return model


def recommender(model):
    """The exported model, from users to the ten best of all items."""
    user = keras.Input([], dtype="int64", name="user")
    items = model.get_layer("items")(ops.arange(NUM_ITEMS))
    scores = ops.matmul(model.get_layer("users")(user), ops.transpose(items))
    return keras.Model(user, ops.top_k(scores, 10)[1])


exporter = tfdist.FinalExporter("serving", recommender)
metrics, exports = tfdist.train_and_evaluate(
    tfdist.Estimator(model_fn, tfdist.RunConfig(args.model_dir)),
    tfdist.TrainSpec(train_input_fn, args.steps),
    tfdist.EvalSpec(lambda: purchases(9_000, 2).batch(256), exporters=exporter),
)
if metrics:  # Only in the task that evaluates.
    print(f"top 10: {metrics['top_10']:.3f}; exported to {exports[0]}")
