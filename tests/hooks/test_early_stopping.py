from types import SimpleNamespace

import pytest
import tensorflow as tf
from both_sessions import Scripted
from counting import count

from tfdist.hooks import early_stopping
from tfdist.hooks.early_stopping import (
    make_early_stopping_hook,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)

EVERY_STEP = {"run_every_secs": None, "run_every_steps": 1}
# The metrics of the test of Estimator's own early stopping (TF 2.15).
ACCURACY = {1000: 0.65, 2000: 0.70, 3000: 0.75, 4000: 0.80, 5000: 0.75}
LOSS = {1000: 0.9, 2000: 0.8, 3000: 0.7, 4000: 0.6, 5000: 0.65}


def evaluator(directory, **metrics):
    """Writes results by step, as an evaluator does."""
    writer = tf.summary.create_file_writer(str(directory))
    for name, values in metrics.items():
        for step, value in values.items():
            with writer.as_default(step=step):
                tf.summary.scalar(name, value)
    writer.close()


def stops(hook):
    return count([hook], 3) == [1]


# --- Cadence -----------------------------------------------------------------


@pytest.mark.parametrize(("every", "asked"), [(1, [1, 2, 3]), (4, [1, 5, 9])])
def test_asks_after_the_first_step_and_every_n_later(every, asked):
    steps = []

    def should_stop():
        steps.append(1)
        return len(steps) == 3

    hook = make_early_stopping_hook(
        None, should_stop, run_every_secs=None, run_every_steps=every
    )
    assert count([hook], 100) == asked


def test_asks_each_minute():
    asked = []
    hook = make_early_stopping_hook(None, lambda: asked.append(1))
    every_step = Scripted("h", [])
    every_step.steps_until_next = lambda step: 1
    assert len(count([hook, every_step], 20)) == 20
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("should_stop_fn", "kwargs", "error", "message"),
    [
        (True, {}, TypeError, "Received: should_stop_fn=True"),
        (bool, {"run_every_steps": 5}, ValueError, "run_every_secs=60"),
        (bool, {"run_every_secs": None}, ValueError, "`run_every_steps`"),
    ],
)
def test_bad_arguments(should_stop_fn, kwargs, error, message):
    with pytest.raises(error, match=message):
        make_early_stopping_hook(None, should_stop_fn, **kwargs)


# --- Predicates --------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "metric", "threshold", "min_steps", "stopped"),
    [
        (stop_if_higher_hook, "accuracy", 0.76, 0, True),
        (stop_if_higher_hook, "accuracy", 0.81, 0, False),
        (stop_if_higher_hook, "accuracy", 0.76, 4001, False),
        (stop_if_lower_hook, "loss", 0.62, 0, True),
        (stop_if_lower_hook, "loss", 0.59, 0, False),
        (stop_if_lower_hook, "loss", 0.62, 4001, False),
        (stop_if_no_increase_hook, "accuracy", 1000, 0, True),
        (stop_if_no_increase_hook, "accuracy", 1001, 0, False),
        (stop_if_no_increase_hook, "loss", 4000, 0, True),
        (stop_if_no_increase_hook, "loss", 4000, 2000, False),
        (stop_if_no_decrease_hook, "loss", 1000, 0, True),
        (stop_if_no_decrease_hook, "loss", 1001, 0, False),
        (stop_if_no_decrease_hook, "accuracy", 3000, 2000, True),
        (stop_if_no_decrease_hook, "accuracy", 3001, 2000, False),
    ],
)
def test_stops(tmp_path, make, metric, threshold, min_steps, stopped):
    evaluator(tmp_path / "eval", accuracy=ACCURACY, loss=LOSS)
    estimator = SimpleNamespace(model_dir=str(tmp_path))
    hook = make(estimator, metric, threshold, min_steps=min_steps, **EVERY_STEP)
    assert stops(hook) == stopped


def test_does_not_stop_before_an_evaluation(tmp_path):
    estimator = SimpleNamespace(model_dir=str(tmp_path))
    assert not stops(
        stop_if_no_increase_hook(estimator, "auc", 0, **EVERY_STEP)
    )


def test_sees_an_evaluation_made_meanwhile(tmp_path):
    class Evaluation(early_stopping.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.session.step == 4:
                evaluator(tmp_path, auc={4: 0.9})

    hook = stop_if_higher_hook(
        None, "auc", 0.8, eval_dir=str(tmp_path), **EVERY_STEP
    )
    assert count([Evaluation(), hook], 10)[-1] == 4


@pytest.mark.parametrize(
    "estimator",
    [
        SimpleNamespace(model_dir="job"),
        SimpleNamespace(model_dir="elsewhere", eval_dir=lambda: "job/eval"),
    ],
)
def test_eval_dir(estimator):
    assert early_stopping.eval_dir_of(estimator) == "job/eval"


def test_a_metric_that_does_not_exist(tmp_path):
    evaluator(tmp_path, accuracy=ACCURACY)
    hook = stop_if_higher_hook(
        None, "auc", 0.5, eval_dir=str(tmp_path), **EVERY_STEP
    )
    with pytest.raises(ValueError, match=r"step 1000.*\['accuracy'\].*'auc'"):
        stops(hook)
