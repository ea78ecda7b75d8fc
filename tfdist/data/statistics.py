"""Statistics of the data that a model needs before it is built.

Means for normalization, bucket boundaries and vocabularies are computed once,
so that training, evaluation and the export agree to the last bit.

    def compute():
        statistics = tfdist.FeatureStatistics()
        for features, _ in tfdist.read_csv(files, 8192, label_name="income",
                                           shuffle=False, num_epochs=1):
            statistics.add(features)
        age, job = statistics["age"], statistics["job"]
        return {"mean": age.mean, "variance": age.variance,
                "jobs": job.vocabulary(min_count=5)}

    def model_fn():
        known = tfdist.compute_once("gs://bucket/job/statistics.json", compute)
        normalize = keras.layers.Normalization(
            mean=known["mean"], variance=known["variance"])
        ...

Keras' `adapt`, in contrast, needs a layer and a pass over the data for each
feature, sums in float32, and returns NaN if the data contains a single NaN.
"""

from __future__ import annotations

import collections
import json
import logging
import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.arguments import check_at_least
from tfdist._tf.waiting import wait_for
from tfdist.cluster.spec import Cluster, current_cluster

_log = logging.getLogger(__name__)

# How many numbers of a feature to keep for quantiles, in 16 to 32 MB.
MOST_KEPT = 1_000_000
_POLL_SECS = 1.0


def compute_once(
    path: str | os.PathLike[str],
    compute: Callable[[], Any],
    *,
    cluster: Cluster | None = None,
    timeout_secs: float = 3600.0,
) -> Any:
    """Returns a function's result, which the chief computes once per job.

    If the file is missing, the chief (or the only process) writes it, and all
    other tasks wait for it. A restarted job reads the file even if the data has
    changed. To compute new values, use another path.

    >>> path = os.path.join(directory, "statistics.json")
    >>> compute_once(path, lambda: {"mean": 0.5})
    {'mean': 0.5}
    >>> compute_once(path, lambda: "is not called")
    {'mean': 0.5}

    Args:
        path: Path of the file, in a directory that all tasks can read.
        compute: A function that returns a value JSON can represent.
        cluster: The cluster with this task. Default: that of the `RunConfig` in
            an Estimator's `model_fn` and `input_fn`, else of the environment.
        timeout_secs: Seconds that tasks other than the chief wait.

    Returns:
        The content of the file, in which tuples have become lists.

    Raises:
        TimeoutError: The chief has not written the file in time.
        TypeError: JSON cannot represent the value that `compute` returns.
        ValueError: The file does not contain JSON.
    """
    cluster, path = cluster or current_cluster(), os.fspath(path)
    text = storage.read_text(path)
    if text is None and cluster.is_chief:
        text = json.dumps(compute(), indent=1)
        storage.write_text(path, text)
    elif text is None:
        _log.info("Waiting for %s, which the chief computes.", path)
        text = wait_for(
            lambda: storage.read_text(path), timeout_secs, _POLL_SECS
        )
        if text is None:
            raise TimeoutError(
                f"The chief has not written {path} within {timeout_secs:g} s. "
                f"{cluster.task} waits for it. Is the chief running, and do "
                "both see the same directory?"
            )
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"{path} must be the JSON that a chief has written ({error}). "
            "Remove the file if the job's checkpoints are no longer used."
        ) from None


class FeatureStatistics(dict[str, "NumberStatistics | StringStatistics"]):
    """Collects statistics of each feature, batch by batch.

    >>> statistics = FeatureStatistics()
    >>> statistics.add({"age": tf.constant([30.0, 50.0, float("nan")]),
    ...                 "job": tf.constant(["smith", "clerk", "smith"])})
    >>> statistics["age"].mean, statistics["age"].missing
    (40.0, 1)
    >>> statistics["job"].vocabulary()
    ['smith', 'clerk']
    """

    def add(self, features: Mapping[str, tf.Tensor]) -> None:
        """Adds a batch: tensors of strings or numbers, of any shape."""
        for name, values in features.items():
            if name not in self:
                is_string = tf.as_dtype(values.dtype) == tf.string
                kind = StringStatistics if is_string else NumberStatistics
                self[name] = kind()
            self[name].add(values)


class NumberStatistics:
    """Statistics of a numeric feature. NaN and infinity count as missing.

    Mean and variance are exact up to float64 rounding, even if the mean is
    large compared to the deviation (Chan, Golub and LeVeque, 1979, "Updating
    Formulae and a Pairwise Algorithm for Computing Sample Variances").
    Boundaries are computed from a uniform sample of at most 1,000,000 numbers:
    each is within 0.2 % of its rank with a probability of 99.9 %.

    Attributes:
        count: Number of values that are present.
        missing: Number of missing values.
        minimum, maximum: Of the present values; infinite if there are none.
    """

    def __init__(self) -> None:
        self.count = self.missing = 0
        self.minimum, self.maximum = float("inf"), float("-inf")
        self._origin = self._mean = self._squares = 0.0
        self._kept: list[np.ndarray] = []  # With two rows: keys, numbers.
        self._num_kept = 0
        self._random = np.random.default_rng(0)  # The same sample every time.

    def add(self, values: tf.Tensor | np.ndarray) -> None:
        """Adds numbers, a tensor of any shape."""
        values = _flat(values)
        present = values[np.isfinite(values)]
        self.missing += len(values) - len(present)
        if not len(present):
            return
        if not self.count:
            self._origin = float(present[0])
        # Relative to `_origin`, so that a mean far from zero loses no digits.
        exact = present.astype(np.float64) - self._origin
        mean = exact.mean()
        squares = np.square(exact - mean).sum()
        distance, total = mean - self._mean, self.count + len(exact)
        self._mean += distance * len(exact) / total
        self._squares += squares + distance**2 * self.count * len(exact) / total
        self.count = total
        self.minimum = min(self.minimum, float(present.min()))
        self.maximum = max(self.maximum, float(present.max()))
        keys = self._random.random(len(present))
        self._kept.append(np.stack([keys, present]))
        self._num_kept += len(present)
        if self._num_kept > 2 * MOST_KEPT:
            self._sample()

    @property
    def mean(self) -> float:
        """The mean of the present values; 0 if there are none."""
        if self.minimum == self.maximum:  # Avoids rounding.
            return self.minimum
        return float(self._origin + self._mean)

    @property
    def variance(self) -> float:
        """The population variance of the present values; 0 if none."""
        if self.minimum >= self.maximum:
            return 0.0
        return float(self._squares / self.count)

    def boundaries(self, num_buckets: int) -> list[float]:
        """Boundaries of at most `num_buckets` buckets of about equal count.

        The most frequent number is not counted, but is itself a boundary: a
        column of zeros with a few exceptions is split among the exceptions.

        Returns:
            Fewer than `num_buckets` numbers from the data, ascending; each is
            the lower end of a bucket, as in `keras.layers.Discretization`.

        Raises:
            ValueError: `num_buckets` is less than 2.
        """
        check_at_least("num_buckets", num_buckets, 2)
        values = self._sample()
        distinct, counts = np.unique(values, return_counts=True)
        if len(distinct) < 2:
            return []
        most_frequent = distinct[counts.argmax()]
        ranks = np.linspace(0, 1, num_buckets)[1:-1]
        others = values[values != most_frequent]
        cuts = np.quantile(others, ranks, method="nearest")
        return np.unique([*cuts, most_frequent]).tolist()

    def _sample(self) -> np.ndarray:
        """Keeps the numbers with the smallest random keys: a uniform sample."""
        kept = np.concatenate([np.empty((2, 0)), *self._kept], 1)
        if self._num_kept > MOST_KEPT:
            kept = kept[:, np.argpartition(kept[0], MOST_KEPT)[:MOST_KEPT]]
        self._kept, self._num_kept = [kept], kept.shape[1]
        return kept[1]


def _flat(values: Any) -> np.ndarray:
    """Returns all values of a dense, sparse or ragged tensor."""
    values = getattr(values, "flat_values", getattr(values, "values", values))
    return np.ravel(tf.convert_to_tensor(values))


class StringStatistics:
    """Statistics of a string feature. The empty string counts as missing.

    Every distinct string is kept in memory.

    Attributes:
        counts: Maps each string (`bytes`) to its number of occurrences.
        missing: Number of empty strings.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[bytes] = collections.Counter()
        self.missing = 0

    def add(self, values: tf.Tensor | np.ndarray) -> None:
        """Adds strings, a tensor of any shape."""
        self.counts.update(_flat(values).tolist())
        self.missing += self.counts.pop(b"", 0)

    def vocabulary(self, *, min_count: int = 1) -> list[str]:
        """The strings that occur at least `min_count` times, by frequency.

        Ties are in alphabetical order. Raises ValueError for invalid UTF-8.
        """
        words = [w for w, count in self.counts.items() if count >= min_count]
        words.sort(key=lambda word: (-self.counts[word], word))
        try:
            return [word.decode() for word in words]
        except UnicodeDecodeError as error:
            raise ValueError(
                "The words of a vocabulary must be UTF-8. "
                f"Received: {error.object!r}."
            ) from None
