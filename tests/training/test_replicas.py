"""Replicas that share a global batch learn what one would.

Here four, with batches of fewer examples; two are those of the cases.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfdist.training.replicas import share

ROOT = Path(__file__).parents[2]
# Sums are taken in another order; Adam divides by small second moments.
TOLERANCE = 1e-6


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_are_a_partition(size, num):
    batch = {
        "dense": tf.range(size),
        "ragged": tf.RaggedTensor.from_row_lengths(
            tf.range(2 * size), [2] * size
        ),
        "sparse": tf.sparse.from_dense(tf.ones([size, 3])),
    }
    shares = [share(batch, i, num) for i in range(num)]
    sizes = [int(s["dense"].shape[0]) for s in shares]
    assert sum(sizes) == size
    assert max(sizes) - min(sizes) <= 1
    assert [x for s in shares for x in s["dense"].numpy()] == list(range(size))
    for s, n in zip(shares, sizes, strict=True):
        assert s["ragged"].nrows() == n
        assert s["sparse"].dense_shape[0] == n
    whole = tf.sparse.concat(0, [s["sparse"] for s in shares])
    np.testing.assert_array_equal(
        tf.sparse.to_dense(whole), tf.sparse.to_dense(batch["sparse"])
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    directory = tmp_path_factory.mktemp("replicas")
    made = {}
    for num in (1, 4):
        path = directory / f"{num}.json"
        command = [sys.executable, "-m", "tests.replica_checks"]
        command += [f"--replicas={num}", f"--report={path}"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=300)
        made[num] = json.loads(path.read_text())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_weights_after_fifty_steps(reports, optimizer):
    ours, wanted = reports[4][optimizer], reports[1][optimizer]
    # Keras' own trackers of each output's loss count batches, not examples.
    for name in ("loss", "click_auc", "price_mae"):
        assert ours["metrics"][name] == pytest.approx(
            wanted["metrics"][name], abs=1e-5
        )
    assert ours["evaluated"] == pytest.approx(wanted["evaluated"], abs=1e-5)
    assert ours["values"].keys() == wanted["values"].keys()
    largest = 0.0
    for name, parts in wanted["values"].items():
        for mine, theirs in zip(ours["values"][name], parts, strict=True):
            np.testing.assert_allclose(
                mine, theirs, TOLERANCE, TOLERANCE, err_msg=name
            )
            largest = max(largest, np.max(np.abs(np.subtract(mine, theirs))))
    print(f"\n{optimizer}: off by {largest:.1e} at most")
