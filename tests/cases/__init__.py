"""Programs as Keras' users write them, each run under every strategy.

A case is a function of a `Job`, in a module of this folder that is named after
its area. `test_cases.py` runs all cases under each strategy and prints a table
that shows which ones work, and the error messages of those that are refused.
"""

import dataclasses
import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping

import keras
import numpy as np
import tensorflow as tf

import tfdist
from tfdist._tf.private_keras import reset_object_names
from tfdist.checkpoint.checkpoints import named_variables

STRATEGIES = ("one process", "mirrored", "all-reduce", "ps")
STEPS, BATCH = 4, 12
_cases: list["Case"] = []


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        area: The name of its module.
        name: Its name in the table.
        run: Runs the case, and asserts that the results are those of Keras.
        refused: Maps a strategy to a pattern of the expected error message.
    """

    area: str
    name: str
    run: Callable[["Job"], None]
    refused: Mapping[str, str]


def case(name=None, refused=None):
    """Adds a function of a `Job` to the table.

    Args:
        name: Default: the function's name, with spaces for underscores.
        refused: A pattern of the error message that every strategy raises, or
            a dict from a strategy to the pattern of its message.
    """
    if isinstance(refused, str):
        refused = dict.fromkeys(STRATEGIES, refused)

    def add(run):
        area = run.__module__.rpartition(".")[2].replace("_", " ")
        title = name or run.__name__.replace("_", " ")
        _cases.append(Case(area, title, run, refused or {}))
        return run

    return add


def all_cases():
    """Returns the cases of all modules of this folder, sorted by area."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    return sorted(_cases, key=lambda case: case.area)


def examples(size=BATCH, seed=0):
    """Four features, and whether their sum is positive."""
    x = np.random.default_rng(seed).normal(size=[size, 4]).astype("float32")
    return x, (x.sum(1, keepdims=True) > 0).astype("float32")


def compiled(*layers, optimizer="sgd", loss="mse", **arguments):
    """Returns a compiled `Sequential` model of four features."""
    model = keras.Sequential([keras.Input([4]), *layers])
    model.compile(optimizer, loss, **arguments)
    return model


class Job:
    """Trains programs under one strategy, and compares them with Keras.

    Attributes:
        strategy: One of `STRATEGIES`.
        model_dir: An empty folder, the same for all tasks.
        is_chief: Whether this process writes the checkpoints.
        backup_workers: Passed to the `RunConfig` of an `estimator`.
    """

    def __init__(self, strategy, model_dir, backup_workers=None):
        self.strategy, self.backup_workers = strategy, backup_workers
        self.model_dir = str(model_dir)
        self.is_chief = tfdist.Cluster.from_env().is_chief

    def estimator(self, model_fn, **config):
        """An Estimator that gives its models the same initial weights."""
        config = {
            "save_checkpoints_steps": 1000,
            "backup_workers": self.backup_workers,
            "strategy": "mirrored" if self.strategy == "mirrored" else "auto",
            **config,
        }
        return tfdist.Estimator(
            lambda: seeded(model_fn), tfdist.RunConfig(self.model_dir, **config)
        )

    def trains_as_fit(
        self,
        model_fn,
        data=None,
        steps=STEPS,
        rtol=1e-4,
        atol=1e-5,
        theirs=None,
        **config,
    ):
        """Trains, step by step, and compares every weight with Keras' `fit`.

        `fit` trains the same model on the same examples.

        Args:
            model_fn: Creates a compiled model.
            data: (x, y) or (x, y, weights) of one batch, used in every step:
                arrays, because a process must join an all-reduce job before
                TensorFlow creates a tensor. Default: `examples()`. Or an input
                function.
            steps: Number of steps.
            rtol, atol: Tolerances of the weights' difference from `fit`.
            theirs: Creates the model that `fit` trains. Default: `model_fn`.
            **config: Passed to `tfdist.RunConfig`.

        Returns:
            The trained `Estimator`.
        """
        batch = examples() if data is None else data

        def repeated():
            return tf.data.Dataset.from_tensors(batch).repeat()

        input_fn = data if callable(data) else repeated
        estimator = self.estimator(model_fn, **config)
        estimator.train(input_fn, hooks=[EachStep()], max_steps=steps)
        if self.is_chief:
            model = seeded(theirs or model_fn)
            model.fit(input_fn(), steps_per_epoch=steps, verbose=0)
            assert_weights_are_those_of(estimator, model, rtol, atol)
        return estimator


class EachStep(tfdist.SessionRunHook):
    """Starts each step only after the previous one has ended."""

    wants_none_under_way = True

    def steps_until_next(self, step):
        return 1


def seeded(model_fn):
    """Calls `model_fn`; the model has the same names and values each time."""
    reset_object_names()
    keras.utils.set_random_seed(7)
    return model_fn()


def assert_weights_are_those_of(
    estimator, model: keras.Model, rtol=1e-4, atol=1e-5
) -> None:
    """Compares the newest checkpoint with a model, weight by weight."""
    wanted = named_variables(model, optimizer=False)
    names = set(estimator.get_variable_names())
    assert wanted.keys() <= names, (sorted(wanted), sorted(names))
    for name, value in wanted.items():
        found = estimator.get_variable_value(name)
        np.testing.assert_allclose(
            found, value.numpy(), rtol=rtol, atol=atol, err_msg=name
        )


def outcome(case, job):
    """Runs a case; returns "works", or the first line of the expected error.

    Raises:
        AssertionError: Its results differ from Keras', or an error is missing.
        Exception: It fails with an unexpected error.
    """
    pattern = case.refused.get(job.strategy)
    try:
        case.run(job)
    except (ValueError, TypeError, NotImplementedError, LookupError) as error:
        if not (pattern and re.search(pattern, str(error))):
            raise
        return f"refused: {str(error).splitlines()[0]}"
    assert not pattern, f"It trains, but the error {pattern!r} is expected."
    return "works"
