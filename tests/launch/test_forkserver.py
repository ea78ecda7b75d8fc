import contextlib
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.launch.test_launch import ROOT, Launch, is_alive, wait_until_gone
from tfdist._tf.waiting import wait_for
from tfdist.launch import processes
from tfdist.launch.forkserver import ForkServer
from tfdist.launch.processes import all_processes, spawn, task_environment

DEADLINE = 60.0

# What a program sees of the process it is in; the modules are empty ones.
SHOW = """
import json, os, sys
before = "tensorflow" in sys.modules
import tensorflow
environment = {k: v for k, v in os.environ.items() if k != "_"}
print(json.dumps({
    "argv": sys.argv, "orig_argv": sys.orig_argv, "path": sys.path,
    "name": __name__, "file": __file__, "package": __package__,
    "spec": __spec__ and __spec__.name, "cwd": os.getcwd(),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "environment": environment, "stdin": sys.stdin.read(),
    "parent": os.getppid(),
    "leads": os.getpgid(0) == os.getsid(0) == os.getpid(),
    "fds": sorted(os.listdir("/proc/self/fd")),
    "network": os.readlink("/proc/self/ns/net"),
    "was imported": before,
}))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder, with modules that stand for heavy ones."""
    for name in ("tensorflow", "keras", "inner"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return tmp_path


@contextlib.contextmanager
def server_for(*program):
    """A fork server for a program, closed at the end."""
    server = ForkServer([sys.executable, *program], task_environment("ps"))
    try:
        server.start()
        yield server
    finally:
        server.close()
        # Else orphans of later tests come here, too, where nobody reaps them.
        processes.adopt_orphans(False)


def environment(**more):
    return {**task_environment("worker"), "TF_CONFIG": "{}", **more}


def ended(process):
    """Output and exit code; no process is left of its group."""
    output, _ = process.communicate(timeout=DEADLINE)
    return output.decode(), process.returncode


def run_forked(*program, **more):
    with server_for(*program) as server:
        return fork([sys.executable, *program], server, **more)


def fork(command, server, **more):
    """Output and exit code of a fork; None of both if there is none."""
    read, write = os.pipe()
    with os.fdopen(read) as output:
        with os.fdopen(write, "w") as stdout:
            process = server.fork(command, environment(**more), stdout)
        return (output.read(), process.wait()) if process else None


def run_plainly(*program, **more):
    command = [sys.executable, *program]
    return ended(spawn(command, environment(**more)))


@pytest.mark.parametrize(
    "program",
    [
        ["-m", "show", "--flag=x", "-m", "é"],
        ["-m", "inner.show"],
        ["-m", "inner"],
        ["show.py", "a b"],
        ["inner/show.py"],
    ],
    ids=" ".join,
)
def test_a_program_sees_what_it_would_see_plainly(folder, program):
    for path in ("show.py", "inner/show.py", "inner/__main__.py"):
        (folder / path).write_text(SHOW)
    plain, forked = (
        json.loads(run(*program, ROLE="worker:1")[0])
        for run in (run_plainly, run_forked)
    )
    assert [x.pop("was imported") for x in (plain, forked)] == [False, True]
    assert plain == forked
    assert forked["environment"]["ROLE"] == "worker:1"
    assert "GLIBC_TUNABLES" not in forked["environment"]


def test_the_kernel_names_it_for_its_task(folder):
    """Its command line and environment are those of the server there."""
    (folder / "own.py").write_text("print(open('/proc/self/comm').read())")
    task = json.dumps({"task": {"type": "worker", "index": 12}})
    assert run_forked("own.py", TF_CONFIG=task) == ("worker:12\n\n", 0)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("sys.exit(7)", 7),
        ("raise ValueError('x')", 1),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("pass", 0),
    ],
)
def test_exit_codes_are_those_of_the_program(folder, ending, code):
    (folder / "end.py").write_text(f"import os, signal, sys\n{ending}")
    assert run_forked("end.py")[1] == code


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow.x", "keras"])
def test_variables_that_are_set_before_the_import_count(folder, name):
    """The program gets a process of its own: in a fork it is too late."""
    (folder / "tensorflow" / "x.py").touch()
    (folder / "sets.py").write_text(f"""
import os, sys
before = "tensorflow" in sys.modules
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import {name}
print(before, os.environ["TF_ENABLE_ONEDNN_OPTS"], sys.argv)
""")
    told = "False 0 ['sets.py', '--a']\n"
    assert run_forked("sets.py", "--a") == (told, 0)


def test_python_is_found_again_by_its_name(folder, monkeypatch):
    folder_of_python, name = os.path.split(sys.executable)
    monkeypatch.setenv("PATH", folder_of_python, prepend=os.pathsep)
    monkeypatch.setattr(sys, "executable", name)
    test_variables_that_are_set_before_the_import_count(folder, "keras")


def test_variables_that_are_set_later_cost_nothing(folder):
    (folder / "sets.py").write_text("""
import os, sys
before = "tensorflow" in sys.modules
from tensorflow import __name__ as name
os.environ["TF_LATER"] = "0"
import tensorflow, keras
print(before)
""")
    assert run_forked("sets.py") == ("True\n", 0)


@pytest.mark.slow
def test_a_restart_of_itself_runs_the_same_command(folder):
    (folder / "again.py").write_text("""
import os, sys
from tfdist.session.recovery import restart_process
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    restart_process("test")
print(sys.argv, os.environ["TF_CONFIG"])
""")
    (folder / "tensorflow").rename(folder / "none")  # It needs the real one.
    output, code = run_forked("again.py", "--a")
    assert (output.splitlines()[-1], code) == ("['again.py', '--a'] {}", 0)


def test_one_that_has_died_forks_no_more(folder):
    command = [sys.executable, "end.py"]
    (folder / "end.py").touch()
    with server_for("end.py") as server:
        assert fork([*command, "--other"], server) is None
        assert fork(command, server) == ("", 0)
        (pid,) = children(os.getpid())
        os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not is_alive(pid), DEADLINE)
        assert fork(command, server) is None
        assert not children(os.getpid())


def test_forks_draw_other_random_numbers(folder):
    (folder / "draws.py").write_text("""
import random, sys, tensorflow, numpy
print(random.random(), numpy.random.random())
""")
    (folder / "tensorflow" / "__init__.py").write_text("import numpy")
    command = [sys.executable, "draws.py"]
    with server_for("draws.py") as server:
        drawn = set()
        for _ in range(2):
            output, code = fork(command, server)
            drawn |= {*output.split()}
            assert code == 0
    assert len(drawn) == 4


def test_an_error_is_traced_from_the_program_on(folder):
    (folder / "fails.py").write_text("def f():\n    1 / 0\nf()")
    output, code = run_forked("fails.py")
    assert code == 1
    assert output == run_plainly("fails.py")[0]


def test_one_that_cannot_import_is_one_all_the_same(folder):
    (folder / "tensorflow" / "__init__.py").write_text("1 / 0")
    (folder / "end.py").write_text("print('ran')")
    assert run_forked("end.py") == ("ran\n", 0)


def test_other_commands_have_none():
    with server_for("program"):
        assert not children(os.getpid())


def children(parent):
    return [
        pid
        for pid, of, _ in all_processes()
        if of == parent and b"launch.forkserver" in command_line(pid)
    ]


def command_line(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# --- In the launcher ---------------------------------------------------------

# Of two workers the first one is killed once.
KILLED = """
warm = "tensorflow" in sys.modules
print("warm", warm, me.task_type)
if me.role == "worker" and first_time():
    print("ready")
    wait_for("die")
    os.kill(os.getpid(), signal.SIGKILL)
if me.role == "worker":
    open("back", "x").close()
wait_for("back")
"""


@pytest.mark.parametrize("dead", [False, True], ids=["forked", "dead"])
def test_a_task_that_dies_is_forked_again(folder, dead):
    with Launch(folder, KILLED, "--workers=1", fork=True) as job:
        job.read_until("ready")
        (server,) = servers_of(job)
        if dead:
            os.kill(server, signal.SIGKILL)
            assert wait_for(lambda: not is_alive(server), DEADLINE)
        (folder / "die").touch()
        assert job.end() == 0
    warm = [line for line in job.lines_of("worker:0") if "warm" in line]
    assert warm == ["warm True worker", f"warm {not dead} worker"]
    assert "restarts: 1 " in job.summary("worker:0")
    assert not is_alive(server)


def servers_of(job):
    """The processes of the launcher that are no tasks."""
    return {*children(job.process.pid)} - {*job.pids.values()}


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_launcher(folder, signum):
    with Launch(folder, "print('up')\nsignal.pause()", fork=True) as job:
        job.read_until("up$")
        (server,) = servers_of(job)
        job.process.send_signal(signum)
        wait_until_gone([server])


def test_a_launcher_that_is_interrupted_before_it_is_ready(folder):
    (folder / "tensorflow" / "__init__.py").write_text(
        "import time; time.sleep(60)"
    )
    with Launch(folder, "print('up')", fork=True) as job:
        (server,) = wait_for(lambda: servers_of(job) or None, DEADLINE)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 128 + signal.SIGTERM
    assert not is_alive(server)
    assert "chief:0      never started" in job.output


def test_one_that_is_never_ready_is_done_without(folder):
    (folder / "keras" / "__init__.py").write_text("import time; time.sleep(60)")
    code = """
import sys
from tfdist.launch import command, forkserver
forkserver.READY_SECS = command.READY_SECS = 1.0
sys.exit(command.main(sys.argv[1:]))
"""
    flags = ("--network=host", "--workers=1")
    with Launch(folder, "print('up')", *flags, code=code, fork=True) as job:
        assert job.end() == 0
        assert not children(job.process.pid)
    assert job.lines_of("worker:0") == ["up"]


def test_orphans_are_reaped(folder):
    """The launcher adopts them, and the fork server that has died is its."""
    script = """
if me.task_type == "chief":
    shell = ["sh", "-c", "sleep 0.1 & echo orphan $!"]
    print(subprocess.run(shell, capture_output=True, text=True).stdout)
print("up")
signal.pause()
"""
    with Launch(folder, script, "--workers=1", fork=True) as job:
        job.read_until("up$", 2)
        (server,) = servers_of(job)
        os.kill(server, signal.SIGKILL)
        orphan = re.search(r"orphan (\d+)", job.output)[1]
        left = [Path(f"/proc/{pid}") for pid in (server, orphan)]
        assert wait_for(lambda: not any(p.exists() for p in left), 10)
        job.process.terminate()
        job.end()


def test_there_is_none_with_no_fork(folder):
    with Launch(folder, "print('up')\ntime.sleep(1)", fork=False) as job:
        job.read_until("up$")
        assert not children(job.process.pid)
        assert job.end() == 0


# --- With TensorFlow ---------------------------------------------------------


@pytest.mark.slow
def test_tensorflow_can_still_be_configured(tmp_path, monkeypatch):
    """Nothing has been started that a program may yet set."""
    monkeypatch.setenv("PYTHONPATH", ROOT)
    (tmp_path / "program.py").write_text("""
import sys, threading
loaded = {"tensorflow", "keras", "tfdist.estimator.training"} <= {*sys.modules}
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(3)
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * 2,
)
print(loaded, len(tf.config.list_logical_devices("CPU")))
""")
    output, code = run_forked(str(tmp_path / "program.py"))
    assert (output.splitlines()[-1], code) == ("True 2", 0)


JOB = """
import sys
from tests import recovery_job
flags = ["--model_dir=model", "--max_steps=1200", "--save_steps=100"]
sys.argv = ["recovery_job", *flags]
recovery_job.main()
"""


@pytest.mark.slow
def test_a_job_of_forks_goes_on(tmp_path, monkeypatch):
    """A server and the chief are killed; it ends at exactly its steps."""
    monkeypatch.setattr("tests.launch.test_launch.DEADLINE", 300.0)
    flags = ("--ps=1", "--workers=1")
    with Launch(tmp_path, JOB, *flags, fork=True) as job:
        for task, step in (("ps:0", 300), ("chief:0", 700)):
            job.read_until(rf"^\[chief:0\] step +{step} ")
            os.kill(job.pids[task], signal.SIGKILL)
            job.read_until(rf"{task} pid .*: started again")
        assert job.end() == 0
    assert re.search(r"Recovered: at step \d+", job.output)
    assert re.search(r"Training continues at step \d+ from", job.output)
    assert re.search(r"step +1200 of 1200", job.output)
    assert not any(map(is_alive, job.pids.values()))
