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
from tfdist.launch.processes import all_processes, spawn, task_environment
from tfdist.launch.spare import Spare

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
def spare_for(*program):
    """A spare for a program, closed at the end."""
    command = [sys.executable, *program]
    spare = Spare(command, task_environment("ps"))
    try:
        yield spare
    finally:
        spare.close()


def environment(**more):
    return {**task_environment("worker"), "TF_CONFIG": "{}", **more}


def ended(process):
    """Output and exit code; no process is left of its group."""
    output, _ = process.communicate(timeout=DEADLINE)
    return output.decode(), process.returncode


def run_as_spare(*program, **more):
    with spare_for(*program) as spare:
        spare.start()
        process = spare.become(environment(**more))
        assert process is not None
        return ended(process)


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
    plain, spare = (
        json.loads(run(*program, ROLE="worker:1")[0])
        for run in (run_plainly, run_as_spare)
    )
    assert [x.pop("was imported") for x in (plain, spare)] == [False, True]
    assert plain == spare
    assert spare["environment"]["ROLE"] == "worker:1"
    assert "GLIBC_TUNABLES" not in spare["environment"]


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
    assert run_as_spare("end.py")[1] == code


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow.x", "keras"])
def test_variables_that_are_set_before_the_import_count(folder, name):
    """The program gets a process of its own: in the spare it is too late."""
    (folder / "tensorflow" / "x.py").touch()
    (folder / "sets.py").write_text(f"""
import os, sys
before = "tensorflow" in sys.modules
os.environ["TF_ENABLE_ONEDNN_OPTS"] = "0"
import {name}
print(before, os.environ["TF_ENABLE_ONEDNN_OPTS"], sys.argv)
""")
    told = "False 0 ['sets.py', '--a']\n"
    assert run_as_spare("sets.py", "--a") == (told, 0)


def test_variables_that_are_set_later_cost_nothing(folder):
    (folder / "sets.py").write_text("""
import os, sys
before = "tensorflow" in sys.modules
from tensorflow import __name__ as name
os.environ["TF_LATER"] = "0"
import tensorflow, keras
print(before)
""")
    assert run_as_spare("sets.py") == ("True\n", 0)


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
    output, code = run_as_spare("again.py", "--a")
    assert (output.splitlines()[-1], code) == ("['again.py', '--a'] {}", 0)


def test_a_spare_that_has_died_is_none(folder):
    (folder / "end.py").touch()
    with spare_for("end.py") as spare:
        assert spare.become(environment()) is None
        spare.start()
        (pid,) = children(os.getpid())
        os.kill(pid, signal.SIGKILL)
        assert wait_for(lambda: not is_alive(pid), DEADLINE)
        assert spare.become(environment()) is None
        assert not children(os.getpid())


def test_one_that_cannot_import_is_one_all_the_same(folder):
    (folder / "tensorflow" / "__init__.py").write_text("1 / 0")
    (folder / "end.py").write_text("print('ran')")
    assert run_as_spare("end.py") == ("ran\n", 0)


def test_other_commands_have_none():
    with spare_for("program") as spare:
        spare.start()
        assert not children(os.getpid())


def children(parent):
    return [
        pid
        for pid, of, _ in all_processes()
        if of == parent and b"launch.spare" in command_line(pid)
    ]


def command_line(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# --- In the launcher ---------------------------------------------------------

AT_ONCE = """
import sys
from tfdist.launch import command
command._SPARE_SECS = 0.1
sys.exit(command.main(["--network=host", *sys.argv[1:]]))
"""

# A worker that is killed once there is a spare.
KILLED = """
warm = "tensorflow" in sys.modules
print("warm", warm, me.task_type)
if me.role == "worker" and first_time():
    print("ready")
    wait_for("die")
    os.kill(os.getpid(), signal.SIGKILL)
if me.role == "worker":
    sys.exit(3) if len(sys.argv) < 2 else open("back", "x").close()
wait_for("back")
"""


@pytest.mark.parametrize("dead", [False, True], ids=["spare", "dead"])
def test_a_task_that_dies_is_replaced_by_it(folder, dead):
    with Launch(folder, KILLED, "--workers=1", code=AT_ONCE) as job:
        job.read_until("ready")
        (spare,) = wait_for(lambda: children(job.process.pid) or None, DEADLINE)
        if dead:
            os.kill(spare, signal.SIGKILL)
            assert wait_for(lambda: not is_alive(spare), DEADLINE)
        (folder / "die").touch()
        assert job.end() == 0
    assert job.lines_of("worker:0")[-1] == f"warm {not dead} worker"
    if not dead:
        assert f"worker:0 pid {spare}: started again." in job.output
    assert "restarts: 1 " in job.summary("worker:0")
    assert not is_alive(spare)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_the_launcher(folder, signum):
    with Launch(folder, "print('up')\nsignal.pause()", code=AT_ONCE) as job:
        job.read_until("up$")
        (spare,) = wait_for(lambda: children(job.process.pid) or None, DEADLINE)
        job.process.send_signal(signum)
        wait_until_gone([spare])


def test_none_is_kept_with_no_spare(folder):
    script = "print('up')\ntime.sleep(2)"
    flags = ("--no_spare",)
    with Launch(folder, script, *flags, code=AT_ONCE) as job:
        job.read_until("up$")
        assert not wait_for(lambda: children(job.process.pid) or None, 1.0)
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
    output, code = run_as_spare(str(tmp_path / "program.py"))
    assert (output.splitlines()[-1], code) == ("True 2", 0)


JOB = """
import sys
from tests import recovery_job
flags = ["--model_dir=model", "--max_steps=1200", "--save_steps=100"]
sys.argv = ["recovery_job", *flags]
recovery_job.main()
"""


@pytest.mark.slow
def test_a_job_goes_on_with_spares(tmp_path, monkeypatch):
    """A server and the chief are killed; it ends at exactly its steps."""
    monkeypatch.setattr("tests.launch.test_launch.DEADLINE", 300.0)
    flags = ("--ps=1", "--workers=1")
    with Launch(
        tmp_path, JOB, *flags, code=AT_ONCE.replace("0.1", "5.0")
    ) as job:
        job.read_until(r"^\[chief:0\] step +200 ")
        killed = []
        for task, step in (("ps:0", 500), ("chief:0", 900)):
            job.read_until(rf"^\[chief:0\] step +{step} ")
            # One that has become a task keeps its name.
            (spare,) = {*children(job.process.pid)} - {*job.pids.values()}
            os.kill(job.pids[task], signal.SIGKILL)
            job.read_until(rf"{task} pid {spare}: started again")
            killed.append(spare)
        assert job.end() == 0
    assert re.search(r"Recovered: at step \d+", job.output)
    assert re.search(r"Training continues at step \d+ from", job.output)
    assert re.search(r"step +1200 of 1200", job.output)
    assert not any(map(is_alive, killed))
