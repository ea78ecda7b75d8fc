import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PATHS = sorted((ROOT / "tfdist").glob("*.py"))
MODULES = {path.stem: ast.parse(path.read_text()) for path in PATHS}

# design.md, section 3; every new module needs a floor.
FLOORS = {
    0: "cluster connections processes faults placement partition variables "
    "lookups forward packing branch_and_bound splitting plans planner "
    "device_setter input_fns inputs audit blocks csv_records reading "
    "record_files tfds_inputs storage chooser cost_formulas cost_model "
    "machines reasons workload errors tpu statistics block_cache "
    "worker_context input_wait _private",
    1: "servers health fence staleness strategy embedding exchange routing "
    "optimizers slots kernels multi_optimizer replicas peers gates "
    "stages micro_batches model_parallel data_service",
    2: "step compiled_model keras_step loop replicated_loop workers "
    "coordinated_loop recovery checkpoint finite hooks default_hooks "
    "session_run_hook saving_hooks summary_hooks events progress "
    "early_stopping callbacks unread_data",
    3: "session warm_start evaluation results exporters saved_models serving "
    "specs",
    4: "estimator building training canned canned_model heads networks "
    "vocabulary feature_columns keras_columns estimator_checkpoint launch "
    "testing supervisor vertex vertex_checks vertex_jobs vertex_machines "
    "kubernetes tuning __init__",
}
FLOOR = {name: n for n, names in FLOORS.items() for name in names.split()}

# Where the environment may be touched, and for what.
ENVIRONMENT = {
    "tfdist/cluster.py",  # Reads TF_CONFIG and CLUSTER_SPEC.
    "tfdist/launch.py",  # NO_COLOR and TERM of the user's terminal.
    "tfdist/processes.py",  # Builds the environment of a child.
    "tfdist/servers.py",  # Sets TF_GRPC_DEFAULT_OPTIONS for TensorFlow.
    "tfdist/recovery.py",  # Sets it for the process that it becomes.
    "tfdist/strategy.py",  # Sets GRPC_FAIL_FAST, which TensorFlow reads.
    "trainer/__init__.py",  # Sets TF_CPP_MIN_LOG_LEVEL, likewise.
    "trainer/task.py",  # Reads AIP_*, the defaults of --model_dir.
}

SOURCES = {
    str(path.relative_to(ROOT)): ast.parse(path.read_text())
    for package in ("tfdist", "trainer")
    for path in sorted((ROOT / package).glob("*.py"))
}


def imports(tree):
    """Full names of all modules and members that a file imports at runtime."""
    for node in runtime_nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def runtime_nodes(tree):
    """All nodes but those under `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        typing_only = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(
            node.test
        )
        if not typing_only:
            yield node
            yield from runtime_nodes(node)


def tfdist_imports(name):
    names = {
        full.split(".")[1]
        for full in imports(MODULES[name])
        if full.startswith("tfdist.")
    }
    return names & set(MODULES)


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    assert name in FLOOR, "give the new module a floor in FLOORS"
    for other in tfdist_imports(name):
        assert FLOOR[other] <= FLOOR[name], f"{name} imports {other}"


def test_imports_have_no_cycle():
    remaining = {name: tfdist_imports(name) for name in MODULES}
    while remaining:
        free = [
            n for n, needs in remaining.items() if not needs & set(remaining)
        ]
        assert free, f"a cycle among {sorted(remaining)}"
        for name in free:
            del remaining[name]


def test_tfdist_knows_no_trainer():
    for name, tree in MODULES.items():
        assert not any(full.startswith("trainer") for full in imports(tree)), (
            name
        )


@pytest.mark.parametrize("path", SOURCES)
def test_environment_is_touched_in_few_places(path):
    touched = any(
        isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
        for node in ast.walk(SOURCES[path])
    )
    assert not touched or path in ENVIRONMENT


@pytest.mark.parametrize("path", SOURCES)
def test_private_imports_are_in_one_file(path):
    if path == "tfdist/_private.py":
        return
    private = {
        full
        for full in imports(SOURCES[path])
        if full.startswith(("tensorflow.python", "tensorflow.core"))
        or full.startswith("keras.src")
    }
    assert not private


@pytest.mark.parametrize("path", SOURCES)
def test_flags_are_defined_in_the_programs_alone(path):
    programs = {
        "trainer/task.py",
        "tfdist/audit.py",
        "tfdist/chooser.py",
        "tfdist/kubernetes.py",
        "tfdist/launch.py",
        "tfdist/planner.py",
        "tfdist/vertex.py",
    }
    parsers = {"absl.flags", "argparse"}
    assert not parsers & set(imports(SOURCES[path])) or path in programs


@pytest.mark.parametrize("path", SOURCES)
def test_nothing_happens_at_import(path):
    """A module holds definitions; `trainer/__init__` sets one default."""
    for node in SOURCES[path].body:
        call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        if call and path != "trainer/__init__.py":
            assert ast.unparse(node).startswith("flags.DEFINE_"), path
