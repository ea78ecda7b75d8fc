"""A synthetic click log, as a TensorFlow Datasets builder.

None of the data is real. Users and items are drawn from Zipf's law: as in an
advertising log, a few occur very often and most once or twice. Clicks are drawn
from a logistic model that this file defines. The true probability of every
click is therefore known, and with it the best AUC that any model can reach on
the evaluation split: no model can rank the examples better than the
probabilities from which they were drawn.

    builder = ClickLog(data_dir=...)
    builder.download_and_prepare()    # a few seconds, nothing is downloaded
    builder.as_dataset(split="train")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds

NUM_USERS = 100_000
NUM_ITEMS = 20_000
COUNTRIES = ("br", "de", "fr", "gb", "in", "it", "jp", "mx", "us", "za")
DEVICES = ("desktop", "phone", "tablet", "tv")
CATEGORIES = (
    "books clothes food games garden music news sport tools toys travel video"
).split()


class ClickLog(tfds.core.ShardBasedBuilder):
    """Impressions of items to users, and whether the user clicked.

    Columns: `user`, `item`, `country`, `device`, `category` (strings), `hour`
    (0 to 23), `age` (years), `price`, `position` (on the page, from 1), the
    label `clicked`, and `probability`, the true probability of the click.
    `probability` is not a supervised input: it is for evaluating a model, not
    for training.

    Args:
        data_dir: directory of the record files, which need not exist yet.
        num_train: number of examples in the split "train".
        num_eval: number of examples in the split "test".
        num_shards: number of record files per split.
    """

    VERSION = tfds.core.Version("1.0.0")
    # TFDS looks for a file of checksums here. Nothing is downloaded, and the
    # lookup needs a package that TFDS 4.9.10 does not declare.
    code_path = None

    def __init__(
        self,
        *,
        data_dir: str | None = None,
        num_train: int = 300_000,
        num_eval: int = 50_000,
        num_shards: int = 8,
    ) -> None:
        self._num_examples = {"train": num_train, "test": num_eval}
        self._num_shards = num_shards
        super().__init__(data_dir=data_dir)

    def _info(self) -> tfds.core.DatasetInfo:
        words = "user item country device category".split()
        numbers = {"hour": np.int64, "age": np.float32, "price": np.float32}
        columns = dict.fromkeys(words, np.str_) | numbers
        columns["position"] = np.int64
        label = tfds.features.ClassLabel(num_classes=2)
        others = {"probability": np.float32, "clicked": label}
        return tfds.core.DatasetInfo(
            builder=self,
            description="A synthetic click log drawn from a known model.",
            features=tfds.features.FeaturesDict(columns | others),
            supervised_keys=({name: name for name in columns}, "clicked"),
            disable_shuffling=True,
        )

    def _shard_iterators_per_split(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, list[Callable[[], Iterator[bytes]]]]:
        del dl_manager  # Nothing is downloaded.
        return {
            split: [
                lambda part=part: serialize(part)
                for part in _parts(draw(number, seed), self._num_shards)
            ]
            for seed, (split, number) in enumerate(self._num_examples.items())
        }

    def _download_and_prepare(
        self,
        dl_manager: tfds.download.DownloadManager,
        download_config: tfds.download.DownloadConfig | None = None,
    ) -> None:
        """Writes the shards.

        TFDS' own writer encodes 14,000 examples per second, one at a time;
        writing serialized records is twenty times as fast.
        """
        del download_config
        splits = []
        iterators = self._shard_iterators_per_split(dl_manager)
        for split, shards in iterators.items():
            template = self._get_filename_template(split_name=split)
            lengths, num_bytes = [], 0
            for index, records in enumerate(shards):
                path = template.sharded_filepath(
                    shard_index=index, num_shards=len(shards)
                )
                lengths.append(0)
                with tf.io.TFRecordWriter(str(path)) as writer:
                    for record in records():
                        writer.write(record)
                        lengths[-1] += 1
                        num_bytes += len(record)
            splits.append(
                tfds.core.SplitInfo(
                    name=split,
                    shard_lengths=lengths,
                    num_bytes=num_bytes,
                    filename_template=template,
                )
            )
        self.info.set_splits(tfds.core.SplitDict(splits))


def draw(num_examples: int, seed: int) -> dict[str, np.ndarray]:
    """Draws examples from the model.

    Args:
        num_examples: number of examples.
        seed: seed of the examples. The model has a fixed seed of its own, so
            every call draws from the same model.

    Returns:
        The columns of `ClickLog`, each a vector of `num_examples` values;
        strings are `bytes`.
    """
    model = np.random.default_rng(2021)
    rng = np.random.default_rng([2021, seed])
    n = num_examples

    user = _zipf(NUM_USERS, n, rng)
    item = _zipf(NUM_ITEMS, n, rng)
    # Attributes of a user or an item are the same in every example.
    country = model.integers(len(COUNTRIES), size=NUM_USERS)[user]
    age = np.round(model.gamma(9.0, 4.0, NUM_USERS) + 14.0)[user]
    category = model.integers(len(CATEGORIES), size=NUM_ITEMS)[item]
    price = np.round(model.lognormal(2.5, 0.8, NUM_ITEMS), 1)[item]
    device = rng.choice(len(DEVICES), size=n, p=(0.3, 0.5, 0.15, 0.05))
    hour = np.floor(rng.triangular(0, 20, 24, n)).astype(np.int64)
    position = rng.integers(1, 11, size=n)

    def effect(*size: int, scale: float) -> np.ndarray:
        return model.normal(0.0, scale, size)

    logit = (
        0.2
        + effect(NUM_USERS, scale=0.1)[user]
        + effect(NUM_ITEMS, scale=0.2)[item]
        + effect(len(COUNTRIES), scale=0.3)[country]
        + effect(len(CATEGORIES), scale=0.6)[category]
        + effect(len(DEVICES), scale=0.4)[device]
        # Interactions, which no sum of single effects can express.
        + effect(len(DEVICES), len(CATEGORIES), scale=0.7)[device, category]
        + effect(len(COUNTRIES), len(CATEGORIES), scale=0.7)[country, category]
        + 0.5 * np.sin(2 * np.pi * (hour - 14) / 24)
        - 0.9 * np.log(position)
        - 0.4 * (np.log(price) - 2.5)
        - 0.0015 * (age - 35) ** 2
    )
    # Rounded before the draw, so that the stored probability is the true one.
    probability = np.round(1 / (1 + np.exp(-logit)), 4)
    return {
        "user": np.char.mod(b"u%05d", user),
        "item": np.char.mod(b"i%05d", item),
        "country": np.array(COUNTRIES, bytes)[country],
        "device": np.array(DEVICES, bytes)[device],
        "category": np.array(CATEGORIES, bytes)[category],
        "hour": hour,
        "age": age.astype(np.float32),
        "price": price.astype(np.float32),
        "position": position,
        "probability": probability.astype(np.float32),
        "clicked": (rng.random(n) < probability).astype(np.int64),
    }


def serialize(columns: dict[str, np.ndarray]) -> Iterator[bytes]:
    """Yields each row as a serialized `tf.train.Example`.

    Serialized protocol buffers can be concatenated to merge their fields. Each
    distinct value of a column is therefore serialized only once, and a row is
    the concatenation of its values.
    """
    rows = zip(*(_parts_of(*column) for column in columns.items()), strict=True)
    return map(b"".join, rows)


def _parts_of(name: str, values: np.ndarray) -> Iterator[bytes]:
    distinct, index = np.unique(values, return_inverse=True)
    parts = [_example(name, value) for value in distinct.tolist()]
    return (parts[i] for i in index.tolist())


def _example(name: str, value: bytes | int | float) -> bytes:
    if isinstance(value, bytes):
        feature = tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))
    elif isinstance(value, int):
        feature = tf.train.Feature(int64_list=tf.train.Int64List(value=[value]))
    else:
        feature = tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
    features = tf.train.Features(feature={name: feature})
    return tf.train.Example(features=features).SerializeToString()


def _parts(
    columns: dict[str, np.ndarray], number: int
) -> list[dict[str, np.ndarray]]:
    """Cuts the rows into `number` consecutive parts."""
    cut = {k: np.array_split(v, number) for k, v in columns.items()}
    return [{k: cut[k][i] for k in columns} for i in range(number)]


def _zipf(size: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Draws `n` numbers k below `size` with weights 1 / (k + 10)."""
    weights = 1.0 / (np.arange(size) + 10.0)
    return np.searchsorted(
        np.cumsum(weights) / weights.sum(), rng.random(n), side="right"
    ).clip(max=size - 1)


def auc(labels: np.ndarray, scores: np.ndarray) -> float:
    """Returns the exact area under the ROC curve, ties counted half.

    >>> auc(np.array([0, 0, 1, 1]), np.array([0.1, 0.4, 0.35, 0.8]))
    0.75
    """
    _, index, counts = np.unique(
        scores, return_inverse=True, return_counts=True
    )
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[index]
    positive = labels > 0
    num_positive, num_negative = positive.sum(), (~positive).sum()
    pairs = ranks[positive].sum() - num_positive * (num_positive + 1) / 2
    return float(pairs / (num_positive * num_negative))
