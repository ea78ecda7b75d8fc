import ast
import doctest
import importlib
import inspect
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfdist
import trainer

ROOT = Path(tfdist.__file__).parent.parent

PUBLIC = [
    "KerasCallbackHook",
    "DNNClassifier",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "LinearClassifier",
    "LinearRegressor",
    "Cluster",
    "replica_device_setter",
    "make_early_stopping_hook",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
    "PartitionedEmbedding",
    "Estimator",
    "BestExporter",
    "Exporter",
    "FinalExporter",
    "FeatureStatistics",
    "compute_once",
    "one_pass",
    "LatestExporter",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "LoggingTensorHook",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "StopAtStepHook",
    "MultiOptimizer",
    "fixed_size_partitioner",
    "min_max_variable_partitioner",
    "variable_axis_size_partitioner",
    "GreedyLoadBalancingStrategy",
    "RandomStrategy",
    "RoundRobinStrategy",
    "byte_size_load_fn",
    "ProgressHook",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "Serving",
    "MonitoredTrainingSession",
    "Trainable",
    "SecondOrStepTimer",
    "SessionRunArgs",
    "SessionRunHook",
    "EvalSpec",
    "RunConfig",
    "TrainSpec",
    "ProfilerHook",
    "StalenessHook",
    "StepCounterHook",
    "SummarySaverHook",
    "train_and_evaluate",
    "WarmStartSettings",
    "choose_strategy",
    "Machines",
    "Recommendation",
    "Workload",
    "Pipeline",
    "ReadOptions",
    "read_array_records",
    "read_csv",
    "read_text",
    "read_tfds",
    "read_tfrecords",
]

MODULES = sorted(
    module.name
    for package in (tfdist, trainer)
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + ".")
)


def test_public_names():
    assert sorted(tfdist.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_object_has_a_docstring(name):
    value = getattr(tfdist, name)
    if value.__module__.startswith("tensorflow."):
        return  # TensorFlow's own, under its own name.
    # A dataclass without a docstring would get its signature for one.
    assert value.__doc__
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


def test_init_holds_nothing_but_the_list():
    stub = ast.parse((ROOT / "tfdist" / "__init__.pyi").read_text())
    assert all(isinstance(node, ast.ImportFrom) for node in stub.body)
    init = ast.parse((ROOT / "tfdist" / "__init__.py").read_text())
    kinds = {type(node) for node in init.body}
    assert kinds <= {ast.Expr, ast.Import, ast.Assign}


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    module = importlib.import_module(name)
    assert module.__doc__
    results = doctest.testmod(module, extraglobs=_names(), verbose=False)
    assert results.failed == 0


def _names():
    """What an example in a docstring may use without importing it."""
    import keras
    import numpy as np
    import tensorflow as tf

    return {"tfdist": tfdist, "keras": keras, "np": np, "tf": tf}
