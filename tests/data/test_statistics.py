"""tfdist/data/statistics.py."""

import json
import math
import statistics as exact
import threading

import hypothesis
import numpy as np
import pytest
import small_models
import tensorflow as tf
from hypothesis import strategies as st

import tfdist
from tfdist.cluster.spec import Cluster
from tfdist.data import statistics
from tfdist.data.statistics import (
    NumberStatistics,
    StringStatistics,
    compute_once,
)

TASKS = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}


def task(task_type):
    config = {"cluster": TASKS, "task": {"type": task_type, "index": 0}}
    return Cluster.from_env({"TF_CONFIG": json.dumps(config)})


# --- Numbers -----------------------------------------------------------------


def of(*batches):
    found = NumberStatistics()
    for batch in batches:
        found.add(batch)
    return found


@hypothesis.example([[5e-324, 0.0]], 0.0)
@hypothesis.given(
    st.lists(
        st.lists(st.floats(-1e3, 1e3) | st.just(math.nan), max_size=20),
        min_size=1,
        max_size=5,
    ),
    st.sampled_from([0.0, 1e9]),
)
def test_moments(batches, offset):
    """Those of exact arithmetic, also far from zero."""
    batches = [np.array(batch) + offset for batch in batches]
    values = [x for batch in batches for x in batch.tolist() if x == x]
    found = of(*batches)
    assert found.count == len(values)
    assert found.missing == sum(map(len, batches)) - len(values)
    if not values:
        assert (found.mean, found.variance) == (0, 0)
        return
    assert (found.minimum, found.maximum) == (min(values), max(values))
    rounding = 4 * np.finfo(float).eps * max(map(abs, values))
    rounding += np.finfo(float).tiny  # That of numbers which are smaller.
    assert found.mean == pytest.approx(exact.mean(values), rel=0, abs=rounding)
    assert found.variance == pytest.approx(
        float(exact.pvariance(values)), rel=1e-8, abs=1e-12
    )


def test_a_constant_has_no_variance():
    found = of(*[np.full(97, 0.1)] * 31)
    assert (found.mean, found.variance) == (0.1, 0)
    assert found.boundaries(10) == []


@hypothesis.given(
    st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=60),
    st.integers(2, 20),
)
def test_boundaries(values, num_buckets):
    values = np.array(values, np.float32)
    cuts = of(values[:7], values[7:]).boundaries(num_buckets)
    assert len(cuts) < num_buckets
    assert cuts == sorted(set(cuts))
    assert set(cuts) <= set(values.tolist())


def test_boundaries_are_quantiles():
    values = np.random.default_rng(0).permutation(np.arange(1000.0))
    cuts = of(*np.split(values, 10)).boundaries(4)
    # 0 is the first of those that are equally frequent.
    assert cuts == [0, 334, 666]
    rare = np.concatenate([np.zeros(900), np.arange(1.0, 102)])
    assert of(rare).boundaries(5) == [0, 26, 51, 76]
    with pytest.raises(ValueError, match="`num_buckets` must be at least 2"):
        of(rare).boundaries(1)


def test_boundaries_of_a_sample(monkeypatch):
    """More than is kept: each cut is near its rank, whatever the order."""
    monkeypatch.setattr(statistics, "MOST_KEPT", 10_000)
    found = of(*np.split(np.arange(100_000.0), 50))
    assert found._num_kept <= 20_000
    cuts = found.boundaries(10)
    ranks = np.linspace(0, 100_000, 10)[1:-1]
    np.testing.assert_allclose(cuts[-8:], ranks, atol=2_000)
    assert cuts == of(*np.split(np.arange(100_000.0), 50)).boundaries(10)


# --- Strings -----------------------------------------------------------------


def test_vocabulary():
    found = StringStatistics()
    found.add(tf.constant([["b", "é", ""], ["a", "é", "b"]]))
    found.add(tf.constant(["é", "c"]))
    assert found.missing == 1
    assert found.vocabulary() == ["é", "b", "a", "c"]
    assert found.vocabulary(min_count=2) == ["é", "b"]
    found.add(tf.constant([b"\xff"]))
    with pytest.raises(ValueError, match=r"must be UTF-8.*\\xff"):
        found.vocabulary()


@pytest.mark.parametrize(
    "values",
    [
        np.array(["a", "", "b", "a"]),
        tf.sparse.from_dense([["a", ""], ["b", "a"]]),
        tf.ragged.constant([["a"], [], ["", "b", "a"]]),
        tf.ragged.constant([["a", ""], ["b", "a"]]),
    ],
)
def test_strings_of_any_tensor(values):
    found = statistics.FeatureStatistics()
    found.add({"x": values})
    assert found["x"].vocabulary() == ["a", "b"]
    numbers = statistics.FeatureStatistics()
    numbers.add({"x": tf.ragged.constant([[1.0], [2.0, 6.0]])})
    numbers.add({"x": tf.sparse.from_dense([[3.0, 0.0]])})
    assert numbers["x"].mean == 3.0


# --- Once, by the chief ------------------------------------------------------


def test_only_the_chief_computes_and_only_once(tmp_path, monkeypatch):
    monkeypatch.setattr(statistics, "_POLL_SECS", 0.01)
    path = str(tmp_path / "job" / "statistics.json")
    found = {}

    def refuse():
        raise AssertionError("It is not the chief.")

    def wait(name):
        found[name] = compute_once(
            path, refuse, cluster=task(name), timeout_secs=30
        )

    waiting = [
        threading.Thread(target=wait, args=[n]) for n in ("worker", "evaluator")
    ]
    for thread in waiting:
        thread.start()
    value = {"mean": 0.1 + 0.2, "words": ("é", "b")}
    first = compute_once(path, lambda: value, cluster=task("chief"))
    for thread in waiting:
        thread.join(30)
    assert first == {"mean": 0.1 + 0.2, "words": ["é", "b"]}
    assert found == {"worker": first, "evaluator": first}
    # A later run, alone and on other data.
    assert compute_once(path, refuse, cluster=Cluster()) == first


def test_a_path_of_pathlib(tmp_path):
    assert compute_once(tmp_path / "job" / "found.json", lambda: [1]) == [1]


def test_what_goes_wrong(tmp_path):
    path = str(tmp_path / "statistics.json")
    with pytest.raises(TimeoutError, match=r"chief has not written .*worker:0"):
        compute_once(path, dict, cluster=task("worker"), timeout_secs=0)

    def fail():
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        compute_once(path, fail, cluster=task("chief"))
    with pytest.raises(TypeError, match="not JSON serializable"):
        compute_once(path, object, cluster=task("chief"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "statistics.json").write_text(json.dumps([1])[:-1])
    with pytest.raises(ValueError, match=r"statistics\.json must be .* JSON"):
        compute_once(path, dict, cluster=task("chief"))


def test_the_cluster_is_that_of_the_run_config(tmp_path, monkeypatch):
    """Not that of the environment, which here says that this is a worker."""
    config = {"cluster": TASKS, "task": {"type": "worker", "index": 0}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    path = str(tmp_path / "statistics.json")

    def model_fn():
        known = compute_once(path, lambda: {"units": 1}, timeout_secs=0)
        assert known == {"units": 1}
        return small_models.logistic()

    def input_fn(context):
        return tfdist.data.one_pass(small_models.batches(16), context)

    config = tfdist.RunConfig(str(tmp_path / "model"), cluster=Cluster())
    estimator = tfdist.Estimator(model_fn, config)
    estimator.train(input_fn)
    assert estimator.evaluate(input_fn)["global_step"] == 2
    with pytest.raises(TimeoutError, match="worker:0 waits"):
        compute_once(str(tmp_path / "other"), dict, timeout_secs=0)
