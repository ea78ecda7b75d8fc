"""No checkpoint and no export holds NaN, whatever the loss says."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_models import blind, examples, logistic

import tfdist
from tfdist._tf.private_checkpoints import ShardedVariable
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.hooks.basic import NanLossDuringTrainingError
from tfdist.training.finite import FiniteCheck

NAN, INF = float("nan"), float("inf")
HUGE = 3e38  # Two of them are more than float32 holds.


def not_finite(**values):
    variables = {n: tf.Variable(v, dtype=t) for n, (v, t) in values.items()}
    return FiniteCheck(variables).not_finite()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_every_kind_of_float(dtype):
    found = not_finite(
        good=([1.0, -2.0], dtype),
        nan=([[1.0], [NAN]], dtype),
        infinite=([INF, -INF], dtype),
        empty=(np.zeros([0, 3]), dtype),
        scalar=(NAN, dtype),
    )
    assert found == ["nan", "infinite", "scalar"]


def test_what_is_no_float_is_not_looked_at():
    assert not_finite(n=([1, 2], "int64"), s=("nan", "string")) == []
    assert FiniteCheck({}).not_finite() == []


def test_large_values_that_are_finite():
    """Their sum is not."""
    assert (
        not_finite(a=([HUGE, HUGE], "float32"), h=([6e4] * 9, "float16")) == []
    )


def test_shards_count_as_one():
    shards = [tf.Variable([0.0]), tf.Variable([NAN]), tf.Variable([INF])]
    assert FiniteCheck({"table": ShardedVariable(shards)}).not_finite() == [
        "table"
    ]


def test_each_question_is_about_now():
    variable = tf.Variable([1.0, 2.0])
    check = FiniteCheck({"v": variable})
    check.trace()
    assert check.not_finite() == []
    variable.assign([NAN, 2.0])
    assert check.not_finite() == ["v"]


def test_nothing_is_written(tmp_path):
    variable = tf.Variable([1.0])
    checkpoints = Checkpoints(str(tmp_path), {"v": variable})
    checkpoints.save(3)
    before = sorted(tmp_path.iterdir())
    variable.assign([NAN])
    with pytest.raises(
        NanLossDuringTrainingError,
        match=r"At step 7 1 of 1 variables .* v\. .*is /.*ckpt-3\.",
    ):
        checkpoints.save(7)
    assert sorted(tmp_path.iterdir()) == before
    off = Checkpoints(str(tmp_path), {"v": variable}, check_numerics=False)
    assert off.save(7).endswith("ckpt-7")


# --- A whole job -------------------------------------------------------------


def model_fn():
    hidden = keras.layers.Dense(8, blind, name="hidden")
    return logistic(hidden=[hidden])


def input_fn(nan_at):
    """Batches of 8; that of step `nan_at` (from 1) has a NaN."""
    x, y = examples(8 * 60)
    x[8 * (nan_at - 1), 1] = NAN
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(8)


def train(model_dir, nan_at, max_steps=40, **config):
    config = tfdist.RunConfig(
        str(model_dir), save_checkpoints_steps=10, **config
    )
    tfdist.train_and_evaluate(
        tfdist.Estimator(model_fn, config),
        tfdist.TrainSpec(lambda: input_fn(nan_at), max_steps),
        tfdist.EvalSpec(
            lambda: input_fn(60).take(9),
            exporters=[tfdist.LatestExporter("latest")],
            throttle_secs=0,
        ),
    )


def values(model_dir):
    """All floats in all checkpoints and exports."""
    indices = [*model_dir.glob("*.index"), *model_dir.rglob("variables.index")]
    for index in indices:
        reader = tf.train.load_checkpoint(str(index.with_suffix("")))
        for key, dtype in reader.get_variable_to_dtype_map().items():
            if dtype.is_floating:
                yield reader.get_tensor(key)


@pytest.mark.parametrize(
    ("nan_at", "max_steps", "good"), [(24, 40, 20), (38, 38, 30)]
)
def test_a_nan_that_the_loss_does_not_show(tmp_path, nan_at, max_steps, good):
    """Found at a checkpoint on the way, or at the one at the end."""
    with pytest.raises(NanLossDuringTrainingError) as raised:
        train(tmp_path, nan_at, max_steps)
    message = str(raised.value)
    assert re.search(rf"hidden/kernel.* is .*ckpt-{good}\.", message)
    newest = tf.train.latest_checkpoint(tmp_path)
    assert newest.endswith(f"model.ckpt-{good}")
    assert all(np.isfinite(value).all() for value in values(tmp_path))
    assert len(list((tmp_path / "export/latest").iterdir())) == good // 10


@pytest.mark.slow
def test_turned_off(tmp_path):
    train(tmp_path, 24, check_numerics=False)
    assert tf.train.latest_checkpoint(tmp_path).endswith("model.ckpt-40")
    assert not all(np.isfinite(value).all() for value in values(tmp_path))
