import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The wings of design.md, section 3, from the ground up: one knows those before.
WINGS = (
    "_tf cluster data placement embeddings training pipeline checkpoint hooks "
    "session estimator canned launch vertex advice"
).split()
COMMANDS = ("__main__", "audit", "kubernetes")
# Where the environment may be touched, and for what.
ENVIRONMENT = {
    "tfdist/__main__.py",  # Sets TF_CPP_MIN_LOG_LEVEL for TensorFlow.
    "tfdist/cluster/spec.py",  # Reads TF_CONFIG and CLUSTER_SPEC.
    "tfdist/cluster/size.py",  # Reads where the launcher's file is.
    "tfdist/launch/resize.py",  # Says so to the launcher's tasks.
    "tfdist/launch/command.py",  # NO_COLOR and TERM of the user's terminal.
    "tfdist/launch/processes.py",  # Builds the environment of a child.
    "tfdist/launch/forkserver.py",  # Takes that of the task it becomes.
    "tfdist/cluster/servers.py",  # Sets TF_GRPC_DEFAULT_OPTIONS for TensorFlow.
    "tfdist/session/recovery.py",  # Sets it for the process that it becomes.
    "tfdist/cluster/strategies.py",  # Sets GRPC_FAIL_FAST for TensorFlow.
    "trainer/__init__.py",  # Sets TF_CPP_MIN_LOG_LEVEL, likewise.
    "trainer/task.py",  # Reads AIP_*, the defaults of its folders.
}


@pytest.fixture(scope="module")
def sources():
    """Each file's path to its tree."""
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text())
        for package in ("tfdist", "trainer")
        for path in sorted((ROOT / package).rglob("*.py"))
    }


@pytest.fixture(scope="module")
def modules(sources):
    """Each module's name to its tree, of those in a wing."""
    return {
        path.removesuffix(".py").replace("/", "."): tree
        for path, tree in sources.items()
        if path.startswith("tfdist/") and path.count("/") > 1
    }


def imports(tree):
    """Full names of all modules and members that a file imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


def test_wings(modules):
    """Each has a door; beside them there are commands alone."""
    children = {
        path.stem
        for path in (ROOT / "tfdist").iterdir()
        if path.is_dir() or path.suffix == ".py"
    }
    assert children - {"__pycache__"} == {"__init__", *WINGS, *COMMANDS}
    for wing in WINGS:
        assert "Read in this order" in ast.get_docstring(
            modules[f"tfdist.{wing}.__init__"]
        )


def test_imports_point_down(modules):
    found = [
        (name, full) for name in modules for full in imports(modules[name])
    ]
    for name, full in found:
        if full.startswith("tfdist.__main__"):
            assert name.endswith(".__main__"), name
        elif full.startswith("tfdist."):
            own, wing = (WINGS.index(n.split(".")[1]) for n in (name, full))
            assert wing <= own, f"{name} imports {full}"


def test_imports_have_no_cycle(modules):
    remaining = {
        name: set(imports(tree)) & set(modules)
        for name, tree in modules.items()
    }
    while remaining:
        free = [
            n for n, needs in remaining.items() if not needs & set(remaining)
        ]
        assert free, f"a cycle among {sorted(remaining)}"
        for name in free:
            del remaining[name]


def test_tfdist_knows_no_trainer(modules):
    for name, tree in modules.items():
        assert not any(full.startswith("trainer") for full in imports(tree)), (
            name
        )


def test_environment_is_touched_in_few_places(sources):
    touch = {
        path
        for path, tree in sources.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("environ", "getenv", "putenv")
    }
    assert touch <= ENVIRONMENT


def test_private_imports_are_in_the_files_named_so(sources):
    private = {
        (path, full)
        for path, tree in sources.items()
        for full in imports(tree)
        if full.startswith(("tensorflow.python", "tensorflow.core"))
        or full.startswith("keras.src")
    }
    others = [x for x in private if not x[0].startswith("tfdist/_tf/private")]
    assert not others


def test_flags_are_defined_in_the_programs_alone(sources):
    programs = {
        "trainer/task.py",
        "tfdist/data/audit.py",
        "tfdist/advice/command.py",
        "tfdist/checkpoint/rehash.py",
        "tfdist/advice/migration.py",
        "tfdist/vertex/kubernetes.py",
        "tfdist/launch/command.py",
        "tfdist/launch/options.py",
        "tfdist/launch/resize.py",
        "tfdist/placement/planner.py",
        "tfdist/vertex/command.py",
    }
    parsers = {"absl.flags", "argparse"}
    define = {p for p, tree in sources.items() if parsers & {*imports(tree)}}
    assert define <= programs


def test_nothing_happens_at_import(sources):
    """A module holds definitions; `trainer/__init__` sets one default."""
    for path, tree in sources.items():
        for node in tree.body:
            call = isinstance(node, ast.Expr) and isinstance(
                node.value, ast.Call
            )
            if call and path != "trainer/__init__.py":
                assert ast.unparse(node).startswith("flags.DEFINE_"), path


def test_the_map_names_what_exists():
    """Every wing and file in `tfdist/README.md`, and its rooms in order."""
    page = (ROOT / "tfdist" / "README.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \|", page, re.MULTILINE)
    assert rows[::-1] == WINGS
    for path in re.findall(r"`(\w+/\w+\.py)`", page):
        assert (ROOT / "tfdist" / path).exists(), path
