"""What an input function or a `build_fn` is called with; how long it takes."""

import functools
import re

import numpy as np
import pytest
import tensorflow as tf
from small_models import batches, logistic

import tfdist
from tfdist.cluster.spec import Cluster
from tfdist.data import fit_data, input_fns
from tfdist.data.worker_context import GroupContext
from tfdist.session.monitored_session import MonitoredTrainingSession


def plain():
    return batches().repeat()


def of_context(context):
    return batches().repeat().skip(context.input_pipeline_id)


def with_defaults(size=64, *, batch_size=8):
    return batches(size, batch_size).repeat()


def undecorated(function):
    """As decorators are that leave out `functools.wraps`."""

    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def wrapped(function):
    return functools.wraps(function)(undecorated(function))


@pytest.mark.parametrize(
    ("input_fn", "takes"),
    [
        (plain, False),
        (of_context, True),
        (with_defaults, False),
        (undecorated(plain), False),
        (wrapped(plain), False),
        (wrapped(of_context), True),
        (functools.partial(of_context, tf.distribute.InputContext()), False),
        (functools.partial(with_defaults, 8), False),
        (lambda *args: plain(), False),
        (lambda **kwargs: plain(), False),
        (lambda context, *args, **kwargs: plain(), True),
    ],
)
def test_what_an_input_function_takes(input_fn, takes):
    assert input_fns.takes_context(input_fn) == takes
    tfdist.TrainSpec(input_fn)
    dataset = input_fns.without_context(input_fn)()
    assert isinstance(dataset, tf.data.Dataset)


def two(context, files):
    return plain()


def keyword_only(*, files):
    return plain()


@pytest.mark.parametrize("input_fn", [two, keyword_only, wrapped(two)])
@pytest.mark.parametrize("spec", [tfdist.TrainSpec, tfdist.EvalSpec])
def test_arguments_that_nobody_gives_are_refused(spec, input_fn):
    with pytest.raises(
        ValueError, match="`input_fn` is called without"
    ) as raised:
        spec(input_fn)
    said = str(raised.value)
    assert "`functools.partial`" in said
    assert "files" in said
    assert re.search(rf"{input_fn.__qualname__}.*test_input_fns.py:\d+", said)


@pytest.mark.parametrize(
    ("input_fn", "name"),
    [(lambda mode: plain(), "mode"), (lambda params: plain(), "params")],
)
def test_what_only_an_estimator_of_tensorflow_gives_is_refused(input_fn, name):
    with pytest.raises(ValueError, match=rf"takes '{name}', which TF 2\.15's"):
        tfdist.TrainSpec(input_fn)
    tfdist.TrainSpec(functools.partial(input_fn, None))


@pytest.mark.parametrize(
    ("input_fn", "told"),
    [
        (lambda: plain().shard(3, 1), True),
        (lambda: plain().shard(1, 0), False),
        (plain, False),
        (lambda context: plain().shard(3, 1), False),
    ],
)
def test_a_shard_that_all_workers_read_is_told(caplog, input_fn, told):
    """TF 1's `shard(config.num_worker_replicas, config.task_id)`."""
    context = tf.distribute.InputContext(num_input_pipelines=3)
    dataset = input_fns.with_context(input_fn)
    tf.function(lambda: dataset(context)).get_concrete_function()
    assert ("Every worker reads shard 1 of 3" in caplog.text) == told
    caplog.clear()
    dataset(context)  # Here it is this process's own.
    assert not caplog.text


def test_a_wrapper_of_what_takes_the_context_fails_aloud(tmp_path):
    config = tfdist.RunConfig(tmp_path, cluster=Cluster())
    estimator = tfdist.Estimator(logistic, config)
    with pytest.raises(TypeError, match="'context'"):
        estimator.train(undecorated(of_context), max_steps=1)


@pytest.mark.parametrize("build_fn", [two, keyword_only])
def test_a_build_fn_of_other_arguments_is_refused(build_fn):
    with pytest.raises(ValueError, match="`build_fn` is called without"):
        MonitoredTrainingSession(build_fn)


@pytest.mark.parametrize("users", [None, True, False])
def test_datasets_tune_themselves_only_if_told_to(users):
    def input_fn():
        dataset = batches().prefetch(tf.data.AUTOTUNE)
        if users is None:
            return dataset
        options = tf.data.Options()
        options.autotune.enabled = users
        return dataset.with_options(options)

    dataset = input_fns.without_context(input_fn)()
    assert dataset.options().autotune.enabled is bool(users)


def test_a_group_keeps_the_global_batch():
    context = GroupContext(3, 1, num_replicas_in_sync=3)
    with pytest.raises(ValueError, match="has not set"):
        context.check(3)
    assert context.get_per_replica_batch_size(48) == 16
    context.check(4)
    with pytest.raises(ValueError, match=r"48 .* not divisible by 5 replicas"):
        context.check(5)


def test_what_is_too_large_to_be_sent_is_refused():
    """Zeros take no memory until somebody reads them."""
    large = np.zeros([2**31], "int8")
    with pytest.raises(ValueError, match=r"`train` has arrays of 4.29 GB"):
        fit_data.input_fns((large[:, None], large), "train", on_ps=True)
    texts = np.array(["a" * 10**6] * 2_000, object)
    with pytest.raises(ValueError, match="less than 2 GB"):
        fit_data.input_fns(texts, "train", on_ps=True)


@pytest.mark.slow
def test_an_input_function_too_large_to_be_sent_is_refused():
    def slices():
        return tf.data.Dataset.from_tensor_slices(np.zeros([2**31], "int8"))

    call = input_fns.with_context(slices)
    with tf.Graph().as_default(), pytest.raises(ValueError, match="read files"):
        call(tf.distribute.InputContext())
