import ast
import doctest
import importlib
import inspect
import os
import pkgutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

import tfdist
import trainer

ROOT = Path(tfdist.__file__).parent.parent

WINGS = [
    n
    for n in tfdist.__all__
    if n.islower() and hasattr(getattr(tfdist, n), "__path__")
]
# At the top.
PUBLIC = (
    "BestExporter CheckpointSaverListener Cluster DNNClassifier "
    "DNNLinearCombinedClassifier DNNLinearCombinedRegressor DNNRegressor "
    "DynamicEmbedding Estimator EvalSpec Exporter FinalExporter "
    "GreedyLoadBalancingStrategy LatestExporter LinearClassifier "
    "LinearRegressor LoggingTensorHook MonitoredTrainingSession MultiOptimizer "
    "NanTensorHook PartitionedEmbedding RandomStrategy RoundRobinStrategy "
    "RunConfig SessionRunHook StopAtStepHook TrainSpec Trainable "
    "WarmStartSettings byte_size_load_fn fit fixed_size_partitioner "
    "min_max_variable_partitioner replica_device_setter train_and_evaluate "
    "variable_axis_size_partitioner"
).split()

# Were at the top, and still resolve there.
MOVED = (
    "CheckpointSaverHook FeatureStatistics FinalOpsHook "
    "KerasCallbackHook Machines "
    "NanLossDuringTrainingError Pipeline ProfilerHook ProgressHook "
    "ReadOptions Recommendation SecondOrStepTimer Serving SessionRunArgs "
    "StalenessHook StepCounterHook SummarySaverHook Workload "
    "choose_strategy compute_once make_early_stopping_hook one_pass "
    "read_array_records read_csv read_text read_tfds read_tfrecords "
    "stop_if_higher_hook stop_if_lower_hook stop_if_no_decrease_hook "
    "stop_if_no_increase_hook"
).split()

MODULES = sorted(
    module.name
    for package in (tfdist, trainer)
    for module in pkgutil.walk_packages(
        package.__path__, package.__name__ + "."
    )
)


def test_public_names():
    assert sorted({*tfdist.__all__} - {*WINGS}) == PUBLIC
    assert len(PUBLIC) <= 40


def test_names_that_have_moved_resolve():
    for name in MOVED:
        assert name not in dir(tfdist)
        wings = [w for w in WINGS if name in getattr(tfdist, w).__all__]
        assert len(wings) == 1, name
        there = getattr(getattr(tfdist, wings[0]), name)
        assert getattr(tfdist, name) is there, name


def test_names_of_wings_resolve():
    for wing in WINGS:
        for name in getattr(tfdist, wing).__all__:
            assert getattr(getattr(tfdist, wing), name) is not None


def test_public_objects_have_docstrings():
    for name in [*PUBLIC, *MOVED]:
        value = getattr(tfdist, name)
        if value.__module__.startswith("tensorflow."):
            continue  # TensorFlow's own, under its own name.
        # A dataclass without a docstring would get its signature for one.
        assert value.__doc__, name
        assert not value.__doc__.startswith(f"{name}(")
        for method, function in inspect.getmembers(value, inspect.isfunction):
            if not method.startswith("_") and method in vars(value):
                assert inspect.getdoc(function), f"{name}.{method}"


@pytest.mark.parametrize("statement", ["tfdist", "tfdist.launch"])
def test_import_is_light(statement):
    code = (
        f"import sys, {statement}; heavy = "
        "{'tensorflow', 'keras', 'numpy', 'grpc'} & set(sys.modules); "
        "sys.exit(', '.join(heavy) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_stubs_hold_nothing_but_the_list():
    for path in (ROOT / "tfdist").rglob("*.pyi"):
        stub = ast.parse(path.read_text())
        assert all(isinstance(node, ast.ImportFrom) for node in stub.body)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path_factory):
    """Those of all docstrings run; each has an empty `directory`."""
    module = importlib.import_module(name)
    assert module.__doc__
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    for test in doctest.DocTestFinder().find(module):
        if test.examples:
            test.globs.update(_names(str(tmp_path_factory.mktemp("example"))))
            runner.run(test)
    assert runner.failures == 0
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL  # All closed.


@pytest.mark.parametrize("wing", WINGS)
def test_every_public_object_has_an_example(wing):
    """But for those that need a cluster or files that are not at hand."""
    finder = doctest.DocTestFinder()
    without = {
        name
        for name, value in vars(_public(wing)).items()
        if callable(value)
        and value.__module__.startswith("tfdist.")
        and not any(t.examples for t in finder.find(value, name, module=False))
    }
    assert without <= NO_EXAMPLE


NO_EXAMPLE = {
    "KerasStep",
    "LocalCluster",
    "read_array_records",
    "read_estimator_checkpoint",
    "read_tfds",
    "release",
    "serve",
}


def _public(wing):
    module = getattr(tfdist, wing)
    return types.SimpleNamespace(
        **{name: getattr(module, name) for name in module.__all__}
    )


def _names(directory):
    """What an example in a docstring may use without importing it."""
    import keras
    import numpy as np
    import tensorflow as tf

    def build_fn():
        step = tf.Variable(0, dtype=tf.int64)
        return tfdist.Trainable(
            lambda: {"loss": 1 / int(step.assign_add(1))}, step, variables={}
        )

    return {
        "tfdist": tfdist,
        "keras": keras,
        "np": np,
        "os": os,
        "tf": tf,
        "build_fn": build_fn,
        "directory": directory,
    }
