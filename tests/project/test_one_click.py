"""Notebooks as a reader opens them: alone, in an empty folder, offline.

The course is cloned from a repository made of this working tree, and installed
by pip into an environment that has what tfdist needs and not tfdist.
"""

import json
import os
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest
from test_notebooks import FOLDER, LESSONS, SOLUTIONS, code, read, source, texts

ROOT = Path(__file__).parents[2]
DEADLINE = 300

pytestmark = pytest.mark.slow

# Replaces a program's process by one that has no right to a private network.
HOST_NETWORK = """
import ctypes, os, sys
uid, gid = os.geteuid(), os.getegid()
if ctypes.CDLL(None).unshare(0x10000000) != 0:
    sys.exit(77)
for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"),
                   ("gid_map", f"{gid} {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
with open("/proc/sys/user/max_net_namespaces", "w") as file:
    file.write("0")
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The address of a repository of this working tree."""
    folder = tmp_path_factory.mktemp("repository") / "tfdist"
    names = "__pycache__", ".*", "build", "_build", "*.egg-info", "runs"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*names))
    me = ["-c", "user.name=me", "-c", "user.email=me@localhost"]
    for command in ["init", "-q"], ["add", "-A"], ["commit", "-qm", "course"]:
        subprocess.run(["git", *me, *command], cwd=folder, check=True)
    return folder.as_uri()


@pytest.fixture
def environ(tmp_path, repository):
    """Variables of a fresh environment; what is installed goes with it."""
    venv = tmp_path / "venv"
    command = [sys.executable, "-m", "venv", "--without-pip", venv]
    subprocess.run(command, check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    # Of a path file only the folders count: an editable tfdist stays behind.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PYT")}
    return kept | {
        "PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # Which for pip means: yes, none.
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "TFDIST_URL": repository,
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "TMPDIR": str(tmp_path),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def python(environ):
    return environ["PATH"].partition(os.pathsep)[0] + "/python"


def test_the_setup_cell_of_every_notebook(tmp_path, environ):
    """Run twice, as after a restart, and once more from within."""
    cells = {source(code(read(name))[0]) for name in LESSONS + SOLUTIONS}
    (cell,) = cells
    empty = tmp_path / "empty"
    empty.mkdir()
    ask = "import tfdist\nprint(tfdist.__file__, course.__file__, os.getcwd())"
    for times in (1, 2):
        done = subprocess.run(
            [python(environ), "-c", "\n".join([cell] * times + [ask])],
            cwd=empty,
            env=environ,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stderr
        *said, paths = done.stdout.splitlines()
        clone = empty / "tfdist"
        assert paths.split() == [
            str(clone / "tfdist/__init__.py"),
            str(clone / "notebooks/course.py"),
            str(clone / "notebooks"),
        ]
        assert len(said) == (times == 1), "it installs once"
    assert os.listdir(empty) == ["tfdist"]


def test_without_the_repository(tmp_path, environ):
    """It says so at once, and asks for no password."""
    cell = source(code(read(LESSONS[0]))[0])
    environ["TFDIST_URL"] = (tmp_path / "none").as_uri()
    done = subprocess.run(
        [python(environ), "-c", cell],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 1
    assert "git" in done.stderr
    assert "/none" in done.stderr


# Two of fourteen, where there is not the time for all.
OTHERS = [name for name in LESSONS if name[:2] not in ("01", "06")]


@pytest.mark.parametrize(
    ("name", "private"),
    [
        (LESSONS[0], False),
        (LESSONS[5], True),
        *(pytest.param(each, True, marks=pytest.mark.soak) for each in OTHERS),
    ],
)
def test_a_whole_notebook(tmp_path, environ, name, private):
    import nbformat
    from nbclient import NotebookClient

    from notebooks.execute import CELL_SECS

    empty = tmp_path / "empty"
    empty.mkdir()
    notebook = nbformat.reads(json.dumps(read(name)), as_version=4)
    client = NotebookClient(
        notebook,
        timeout=CELL_SECS,
        coalesce_streams=True,
        resources={"metadata": {"path": str(empty)}},
    )
    client.create_kernel_manager()
    client.km.transport, client.km.ip = "ipc", str(tmp_path / "kernel")
    kernel = [python(environ), *client.km.kernel_spec.argv[1:]]
    if not private:
        probe = [sys.executable, "-c", HOST_NETWORK, "/bin/true"]
        if subprocess.run(probe).returncode != 0:
            pytest.skip("this system has no user namespaces to take away")
        kernel = [sys.executable, "-c", HOST_NETWORK, *kernel]
    client.km.kernel_spec.argv = kernel
    client.execute(env=environ)
    assert (empty / "tfdist/notebooks").is_dir()
    said = []
    for cell in code(notebook):
        streams = cell["outputs"]
        said += [o["text"] for o in streams if o.get("name") == "stderr"]
        cell["outputs"] = [o for o in streams if o.get("name") != "stderr"]
    refused = "refuses a private network" in " ".join(said)
    assert refused == (not private)
    first, *others = texts(notebook)
    assert "Installing tfdist" in first[0]
    assert others == texts(json.loads((FOLDER / name).read_text()))[1:]
