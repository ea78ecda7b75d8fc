"""Synchronous steps on parameter servers: sums, real clusters, real kills."""

import re
import sys
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from pace import slow

import tfdist
from tests.cases import assert_weights_are_those_of, seeded
from tests.synchronous_job import (
    LIMIT,
    batch,
    counting_model_fn,
    in_one_process,
    model_fn,
)
from tfdist.checkpoint import checkpoints
from tfdist.launch.testing import LocalCluster
from tfdist.training import optimizers
from tfdist.training.aggregation import Accumulators, Contribution
from tfdist.training.step import ModelStep

CHIEF = "chief:0"
TASKS = {"ps": 2, "workers": 3}


SPEC = tf.nest.map_structure(
    lambda t: tf.TensorSpec([None, *t.shape[1:]], t.dtype),
    batch(0, tf.constant(0, tf.int64)),
)


def step_of(optimizer):
    """A step in this process, of a model that always begins alike."""
    model = seeded(model_fn)
    model.compile(optimizer, "mse")
    optimizers.build(optimizer, model.trainable_variables)
    step = ModelStep(model, SPEC, global_step=tf.Variable(0, dtype=tf.int64))
    return model, step


def contribute(step, batches, taken):
    """One step by a worker for each of the batches, of which some are taken."""
    accumulators = Accumulators(step.update, len(batches))
    number = tf.constant(0, tf.int64)
    for i, own in enumerate(accumulators.of_workers):
        part = Contribution(accumulators, tf.constant(i, tf.int64), own)
        step.train(batches[i], number, step.zero_states(), None, part)
    sizes = [len(y) * t for (_, y), t in zip(batches, taken, strict=True)]
    accumulators.apply(tf.constant(sizes, tf.float32), number)


@pytest.mark.parametrize(
    "taken", [(1, 0, 1), *slow(((1, 1, 1),), ((0, 1, 0),))]
)
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.Adagrad(0.1),
        lambda: keras.optimizers.SGD(0.1, global_clipnorm=0.1),
        lambda: keras.optimizers.Ftrl(0.1, clipvalue=0.02),
        lambda: tfdist.MultiOptimizer(
            [
                ("table", keras.optimizers.SGD(0.1, momentum=0.9)),
                ("", keras.optimizers.SGD(0.1, weight_decay=0.1)),
            ]
        ),
    ],
    ids=["Adagrad", "global_clipnorm", "clipvalue", "two rules"],
)
def test_an_update_is_that_of_the_batches_taken_together(make, taken):
    batches = [batch(worker, tf.constant(7, tf.int64)) for worker in range(3)]
    model, step = step_of(make())
    contribute(step, batches, taken)
    used = [b for b, t in zip(batches, taken, strict=True) if t]
    together = tf.nest.map_structure(lambda *t: tf.concat(t, 0), *used)
    wanted, one = step_of(make())
    one.train(together, tf.constant(0, tf.int64), one.zero_states())
    both = [
        checkpoints.named_variables(each).values() for each in (model, wanted)
    ]
    for value, expected in zip(*both, strict=True):
        np.testing.assert_allclose(
            tf.convert_to_tensor(value),
            tf.convert_to_tensor(expected),
            rtol=1e-5,
            atol=1e-6,
        )


class Calls(keras.layers.Layer):
    """Counts its calls, in weights that are no fractions."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False)
        self.called = self.add_weight(shape=(), dtype="bool", trainable=False)

    def call(self, x):
        self.calls.assign_add(2)
        self.called.assign(True)
        return x


def test_moving_weights_that_are_no_fractions():
    model = seeded(lambda: keras.Sequential([Calls(), keras.layers.Dense(1)]))
    model.build([None, 4])
    model.compile("sgd", "mse")
    optimizers.build(model.optimizer, model.trainable_variables)
    zero = tf.constant(0, tf.int64)
    batches = [(d["x"], y) for d, y in (batch(w, zero) for w in range(3))]
    spec = SPEC[0]["x"], SPEC[1]
    step = ModelStep(model, spec, global_step=tf.Variable(0, dtype=tf.int64))
    step._layout.assigns = False  # As on servers.
    contribute(step, batches, (1, 0, 1))
    assert [w.numpy() for w in model.layers[0].weights] == [2, True]


@pytest.mark.parametrize(
    ("optimizer", "match"),
    [
        (keras.optimizers.SGD(clipnorm=1.0), "table's gradient by its norm"),
        (
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
            "do not support LossScaleOptimizer",
        ),
    ],
)
def test_what_no_server_knows_by_itself_is_refused(optimizer, match):
    _, step = step_of(optimizer)
    with pytest.raises(ValueError, match=match):
        Accumulators(step.update, 2)


def test_a_limit_that_keras_ignores_is_none():
    _, step = step_of(keras.optimizers.SGD(clipnorm=-1.0))
    Accumulators(step.update, 2)


def command(model_dir, *flags):
    job = "-m", "tests.synchronous_job", f"--model_dir={model_dir}", *flags
    return [sys.executable, *job]


@pytest.mark.slow
@pytest.mark.parametrize("batches", [LIMIT, 25], ids=["endless", "ends apart"])
def test_steps_are_those_of_one_process_with_the_global_batch(
    tmp_path, batches
):
    """Workers' batches differ in size; each worker has two less."""
    flags = "--backup_workers=0", "--max_steps=30", f"--batches={batches}"
    with LocalCluster(command(tmp_path, *flags), **TASKS) as job:
        assert job.wait(timeout_secs=120) == 0, job.output(CHIEF)
        found = re.findall(r"^loss (\S+)$", job.output(CHIEF), re.MULTILINE)
    losses, model = in_one_process(3, batches, 30)
    assert len(losses) == min(30, batches)
    np.testing.assert_allclose(np.float64(found), losses, rtol=1e-5)
    estimator = tfdist.Estimator(model_fn, tfdist.RunConfig(str(tmp_path)))
    assert_weights_are_those_of(estimator, model, rtol=1e-5)


def taken_in_all(model_dir, step):
    config = tfdist.RunConfig(str(model_dir))
    estimator = tfdist.Estimator(counting_model_fn, config)
    assert estimator.get_variable_value("global_step") == step
    return -estimator.get_variable_value("table/embeddings").sum()


@pytest.mark.slow
def test_the_slowest_worker_is_not_waited_for(tmp_path):
    flags = "--backup_workers=1", "--slow_secs=1", "--max_steps=300", "--count"
    with LocalCluster(command(tmp_path, *flags), **TASKS) as job:
        assert job.wait(timeout_secs=120) == 0, job.output(CHIEF)
        output = job.output(CHIEF)
    dropped = int(re.search(r"(\d+) late gradients were", output).group(1))
    assert 0 < dropped < 100
    assert taken_in_all(tmp_path, 300) == pytest.approx(300, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("backup_workers", [0, 1])
def test_workers_and_servers_that_die(tmp_path, backup_workers):
    """Each step takes one from the table, no more and no less."""
    flags = f"--backup_workers={backup_workers}", "--step_secs=0.01", "--count"
    with LocalCluster(
        command(tmp_path, *flags, "--max_steps=400"), restart_secs=0.5, **TASKS
    ) as job:
        job.wait_until_step(50, timeout_secs=60)
        for task in "worker:0", "worker:2", "ps:0":
            step = job.step
            assert job.kill(task).effect == "SIGKILL"
            time.sleep(0.1)
            job.wait_until_step(step + 50, timeout_secs=60)
        assert job.wait(timeout_secs=120) == 0, job.output(CHIEF)
    assert taken_in_all(tmp_path, 400) == pytest.approx(400, rel=1e-4)
