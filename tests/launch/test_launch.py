import contextlib
import functools
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tfdist._tf.waiting import wait_for
from tfdist.cluster.spec import Cluster
from tfdist.launch import command, network, processes
from tfdist.launch.processes import LineCutter
from tfdist.launch.supervisor import wants_restart

ROOT = str(Path(__file__).parents[2])
DEADLINE = 30.0  # Seconds; nothing here takes more than a few.


# --- Decisions, without processes -------------------------------------------


@pytest.mark.parametrize(
    ("job", "exit_codes", "restarted"),
    [
        ("chief", (0, 1, 127), False),
        ("chief", (128, 134, -9), True),
        ("worker", (0,), False),
        ("worker", (1, 134, -11), True),
        ("evaluator", (0,), False),
        ("ps", (0,), False),
        ("ps", (1, -9), True),
    ],
)
def test_what_wants_a_restart(job, exit_codes, restarted):
    for exit_code in exit_codes:
        assert wants_restart(job, exit_code) is restarted


def test_backoff():
    pauses = [command.backoff_secs(n) for n in range(8)]
    assert pauses == [0, 1, 2, 4, 8, 16, 30, 30]
    assert command.backoff_secs(10_000) == 30


@pytest.mark.parametrize(
    ("exit_code", "shell", "words"),
    [
        (0, 0, "exit code 0"),
        (7, 7, "exit code 7"),
        (-9, 137, "SIGKILL"),
        (-40, 168, "signal 40"),
    ],
)
def test_exit_codes(exit_code, shell, words):
    assert command.shell_exit_code(exit_code) == shell
    assert processes.describe_exit(exit_code) == words


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([b"a\nb", b"c\n"], [b"a", b"bc"]),
        ([b"a\r", b"\nb\r\n"], [b"a", b"b"]),
        ([b"no end"], [b"no end"]),
        ([b"\n\n"], [b"", b""]),
        ([b"1%\r2%\r3%\n"], [b"3%"]),
        ([b"\r1%", b"\r2%", b"\r3%", b"\rdone\n"], [b"done"]),
        ([b"1%\r", b"2%\r", b"3%\r"], [b"3%"]),
        ([b"\xc3", b"\xa9\n"], ["é".encode()]),
    ],
)
def test_line_cutter(chunks, lines):
    cutter = LineCutter()
    got = [line for chunk in chunks for line in cutter.feed(chunk)]
    assert got + cutter.flush() == lines


@pytest.mark.parametrize("drop", [True, False])
def test_line_cutter_drops_the_banner_of_tensorflow(drop):
    banner = [
        b"WARNING: All log messages before absl::InitializeLog() is called ...",
        b"I0000 00:00:1795177989.2   28051 port.cc:153] oneDNN custom ...",
        b"E0000 00:00:1795177998.1   28049 cuda_platform.cc:52] failed call to "
        b"cuInit: ... Failed call to cuInit: UNKNOWN ERROR (303)",
    ]
    rest = [
        b"E0000 00:00:1795177998.1   28049 context.cc:911] Failed to ...",
        b"step 100 of 200",
    ]
    cutter = LineCutter(drop)
    got = cutter.feed(b"\n".join([*banner, *rest, b""]))
    assert got == (rest if drop else banner + rest)


def test_line_cutter_needs_no_endless_memory():
    cutter = LineCutter()
    got = [cutter.feed(b"x" * 10_000) for _ in range(8)]
    assert b"".join(map(b"".join, got)) == b"x" * 70_000


def test_reserved_ports_are_free_for_the_task_alone():
    (holder,) = network.reserve_ports(1)
    port = holder.getsockname()[1]
    with holder, contextlib.closing(socket.socket()) as other:
        assert 10000 <= port < 32768  # Not one of an outgoing connection.
        with pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        # Sets SO_REUSEADDR, as gRPC.
        socket.create_server(("", port)).close()


# --- Whole launches ----------------------------------------------------------

# What a task's script begins with.
PROLOGUE = """
import os, signal, socket, subprocess, sys, time
from tfdist.cluster.spec import Cluster
me = Cluster.from_env()
def first_time():
    try:
        open(f"{me.task_type}{me.task_index}.once", "x").close()
        return True
    except FileExistsError:
        return False
def wait_for(path):
    while not os.path.exists(path):
        time.sleep(0.01)
def port():
    return int(me.address.rpartition(":")[2])
"""


@functools.cache
def refuses_a_private_network():
    """Whether this system does, such as in a container."""
    code = "from tfdist.launch import network as n; n.enter_private_network()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    return done.returncode != 0


class Launch:
    """A launcher as a user starts it, with its output read line by line.

    Its tasks are spawned, for most import no TensorFlow; or forked.
    """

    def __init__(
        self, tmp_path, script, *flags, code=None, fork=False, **popen
    ):
        (tmp_path / "task.py").write_text(PROLOGUE + script)
        start = ["-m", "tfdist.launch"] if code is None else ["-c", code]
        if code is None and refuses_a_private_network():
            start.append("--network=host")  # A later flag wins.
        if not fork:
            start.append("--no_fork")
        environment = {
            **os.environ,
            "PYTHONPATH": ROOT,
            "CLUSTER_SPEC": "of somebody else",
        }
        self.process = subprocess.Popen(
            [sys.executable, *start, *flags, "task.py", "--flag=x"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment,
            **popen,
        )
        self.output = ""
        # A launcher that hangs must not hang the test that reads from it.
        self.watchdog = threading.Timer(DEADLINE, self.process.kill)
        self.watchdog.start()

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.watchdog.cancel()
        self.watchdog.join()
        self.process.stdout.close()

    def read_until(self, pattern, count=1):
        """Reads on until `pattern` has come `count` times."""
        while len(re.findall(pattern, self.output, re.MULTILINE)) < count:
            line = self.process.stdout.readline()
            assert line, f"ended without {pattern!r}:\n{self.output}"
            self.output += line
        return self.output

    def end(self):
        """Reads to the end; returns the exit code."""
        rest, _ = self.process.communicate(timeout=DEADLINE)
        self.output += rest
        return self.process.returncode

    @property
    def pids(self):
        """Process ids by task, from the line that names them at the start."""
        found = re.findall(r"(\w+:\d) pid (\d+)", self.output)
        return {name: int(pid) for name, pid in found}

    def lines_of(self, name):
        prefix = f"[{name}] "
        lines = self.output.splitlines()
        return [x.removeprefix(prefix) for x in lines if x.startswith(prefix)]

    def summary(self, name):
        """The summary line of a task."""
        line = self.lines_of("launch")
        return [x for x in line if re.match(rf"{name} +\S.* seconds:", x)][-1]


def run(tmp_path, script, *flags, **kwargs):
    """Launches to the end; returns the exit code and the launch."""
    with Launch(tmp_path, script, *flags, **kwargs) as job:
        return job.end(), job


def is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(pids):
    assert wait_for(lambda: not any(map(is_alive, pids)), DEADLINE)


SHOW = """
print("env", repr(os.environ["TF_CONFIG"]))
print("also", os.environ.get("CLUSTER_SPEC"), os.environ["PYTHONUNBUFFERED"],
      os.environ["GRPC_FAIL_FAST"], sys.argv[1:], sys.stdin.read())
print("to stderr", file=sys.stderr)
print("no newline at the end", end="")
"""


def test_every_task_gets_its_place(tmp_path):
    code, job = run(tmp_path, SHOW, "--ps=2", "--workers=2", "--evaluator")
    assert code == 0
    names = ["chief:0", "worker:0", "worker:1", "ps:0", "ps:1", "evaluator:0"]
    told = {}
    for name in names:
        first, *rest = job.lines_of(name)
        assert rest == [
            "also None 1 use_caller ['--flag=x'] ",
            "to stderr",
            "no newline at the end",
        ]
        told[name] = Cluster.from_env({"TF_CONFIG": first[5:-1]})
        assert f"{told[name].task_type}:{told[name].task_index}" == name
        assert told[name].address.startswith("127.0.0.1:")
        assert "exit code 0" in job.summary(name)
    assert len({cluster.address for cluster in told.values()}) == 6
    assert len({str(c.training_spec()) for c in told.values()}) == 1
    assert all(cluster.has_evaluator for cluster in told.values())
    assert told["chief:0"].shape == "chief, 2 workers, 2 ps, evaluator"
    assert sorted(job.pids) == sorted(names)


@pytest.mark.slow
def test_a_module_and_its_flags(tmp_path):
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])")
    done = subprocess.run(
        [sys.executable, "-m", "tfdist.launch", "-m", "program"]
        + ["-m", "--ps=3", "--", "--help"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": ROOT,
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=True,
    )
    assert "[chief:0] ['-m', '--ps=3', '--', '--help']" in done.stdout


@pytest.mark.parametrize(
    ("flags", "shape", "role"),
    [
        ((), "chief", "local"),
        (("--evaluator",), "chief, evaluator", "local"),
        (("--workers=1",), "chief, 1 worker", "chief"),
        (("--data_workers=1",), "chief, dispatcher, 1 data worker", "local"),
        (("--ps", "1", "--workers", "2"), "chief, 2 workers, 1 ps", "chief"),
    ],
)
def test_shapes(tmp_path, flags, shape, role):
    code, job = run(tmp_path, "print(me.shape, '/', me.role)", *flags)
    assert code == 0
    assert job.lines_of("chief:0") == [f"{shape} / {role}"]


def test_lines_stay_whole(tmp_path):
    script = """
for n in range(300):
    sys.stdout.write("<" + str(n) * 20); sys.stdout.flush()
    sys.stdout.write(">\\n"); sys.stdout.flush()
"""
    code, job = run(tmp_path, script, "--ps=1", "--workers=2")
    assert code == 0
    for name in ("chief:0", "worker:0", "worker:1", "ps:0"):
        assert job.lines_of(name) == [f"<{str(n) * 20}>" for n in range(300)]


@pytest.mark.parametrize(
    ("ending", "code"),
    [("sys.exit(0)", 0), ("sys.exit(7)", 7), ("raise ValueError", 1)],
)
def test_the_chief_gives_the_exit_code(tmp_path, ending, code):
    script = f"""
if me.task_type == "chief":
    {ending}
"""
    got, job = run(tmp_path, script, "--ps=1", "--workers=1")
    assert got == code
    assert f"exit code {code} " in job.summary("chief:0")


def test_a_failed_worker_and_ps_come_back(tmp_path):
    script = """
if me.role == "chief":
    wait_for("worker0.back"); wait_for("ps0.back")
elif first_time():
    os.kill(os.getpid(), signal.SIGKILL) if me.role == "ps" else sys.exit(3)
open(f"{me.task_type}{me.task_index}.back", "x")
"""
    code, job = run(tmp_path, script, "--ps=1", "--workers=1")
    assert code == 0
    assert "worker:0: exit code 3; started again in 0 s." in job.output
    assert "ps:0: SIGKILL; started again in 0 s." in job.output
    assert re.search(r"exit code 0 +restarts: 1 ", job.summary("worker:0"))
    assert re.search(r"exit code 0 +restarts: 1 ", job.summary("ps:0"))


@pytest.mark.parametrize(("stable", "pauses"), [(0, [0, 0]), (60, [0, 1])])
def test_a_task_that_has_run_for_long_waits_for_nothing(
    tmp_path, stable, pauses
):
    script = """
if me.role == "chief":
    wait_for("back")
    sys.exit(0)
with open("starts", "a") as starts:
    starts.write("x")
sys.exit(3) if os.path.getsize("starts") < 3 else open("back", "x")
"""
    code = f"""
import sys
from tfdist.launch import command
command._STABLE_SECS = {stable}
sys.exit(command.main(sys.argv[1:]))
"""
    flags = ("--workers=1", "--network=host")
    got, job = run(tmp_path, script, *flags, code=code)
    assert got == 0
    found = re.findall(r"exit code 3; started again in (\d) s", job.output)
    assert [int(secs) for secs in found] == pauses


def test_a_worker_that_ends_too_early_is_named(tmp_path):
    """Nobody would start it again, and its chief may wait for it."""
    script = """
if me.role == "chief":
    time.sleep(1.5)
"""
    code = """
import sys
from tfdist.launch import command
command._TERM_SECS = 0.5
sys.exit(command.main(sys.argv[1:]))
"""
    flags = ("--workers=1", "--network=host")
    got, job = run(tmp_path, script, *flags, code=code)
    assert got == 0
    said = "worker:0: ended with exit code 0 0.5 s ago, but the chief still"
    assert job.output.count(said) == 1


def test_the_job_goes_on_without_a_worker(tmp_path):
    script = """
if me.role == "worker":
    with open("starts", "a") as starts:
        starts.write("x")
    sys.exit(3)
while not os.path.exists("starts") or os.path.getsize("starts") < 2:
    time.sleep(0.01)
time.sleep(0.3)
"""
    flags = ("--ps=1", "--workers=1", "--max_restarts=1")
    code, job = run(tmp_path, script, *flags)
    assert code == 0
    assert "exit code 3; out of restarts. The job goes on." in job.output
    assert (tmp_path / "starts").read_text() == "xx"


@pytest.mark.parametrize(
    ("job", "flags"),
    [
        ("ps", ("--ps=1", "--workers=1")),
        ("worker", ("--workers=1",)),
        ("dispatcher", ("--data_workers=1",)),
    ],
)
def test_the_job_ends_with_one_it_cannot_do_without(tmp_path, job, flags):
    script = f"""
if me.role == {job!r}:
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
signal.pause()
"""
    name = f"{job}:0"
    code, job = run(tmp_path, script, *flags, "--max_restarts=0")
    assert code == 1
    assert f"{name}: exit code 3; out of restarts. The job ends." in job.output
    assert "ended by launcher" in job.summary("chief:0")


@pytest.mark.parametrize(
    ("ending", "code"), [("os.abort()", 134), ("sys.exit(139)", 139)]
)
def test_the_chief_is_restarted_like_on_vertex(tmp_path, ending, code):
    script = f"""
if me.task_type == "chief" and (first_time() or {code} == 139):
    {ending}
"""
    got, job = run(tmp_path, script, "--max_restarts=1")
    assert got == (139 if code == 139 else 0)
    assert "restarts: 1" in job.summary("chief:0")


def test_grace_period(tmp_path):
    script = """
if me.task_type == "ps":
    signal.pause()
elif me.task_type == "worker":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    open("ready", "x").close()
    time.sleep(1.5)
    print("finished by itself")
else:
    wait_for("ready")
"""
    flags = ("--ps=1", "--workers=1", "--grace_secs=0.5")
    code, job = run(tmp_path, script, *flags)
    assert code == 0
    assert job.lines_of("worker:0") == ["finished by itself"]
    assert "ended by launcher (exit code 0)" in job.summary("worker:0")
    assert "ended by launcher (SIGTERM)" in job.summary("ps:0")


SLEEP = """
print("child", subprocess.Popen(["sleep", "99"]).pid)
time.sleep(99)
"""


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
)
def test_signals_end_everything(tmp_path, signum, code):
    with Launch(tmp_path, SLEEP, "--ps=1", "--workers=1") as job:
        output = job.read_until(r"child \d+", 3)
        job.process.send_signal(signum)
        assert job.end() == code
        children = [int(pid) for pid in re.findall(r"child (\d+)", output)]
        wait_until_gone([*job.pids.values(), *children])
    assert "ended by launcher (SIGTERM)" in job.summary("worker:0")


def test_a_chief_that_saves_is_waited_for(tmp_path):
    """The others serve on: to kill them would spoil its checkpoint."""
    script = """
if me.task_type == "chief":
    def save(*_):
        time.sleep(2)
        print("saved")
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready")
while True:
    time.sleep(9)
"""
    code = """
import sys
from tfdist.launch import command
command._TERM_SECS = 0.5
sys.exit(command.main(sys.argv[1:]))
"""
    flags = ("--ps=1", "--workers=1", "--network=host")
    with Launch(tmp_path, script, *flags, code=code) as job:
        job.read_until("ready", 3)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 143
    assert job.lines_of("chief:0") == ["ready", "saved"]
    assert "ended by launcher (exit code 143)" in job.summary("chief:0")
    assert "ended by launcher (SIGKILL)" in job.summary("ps:0")


def test_the_second_ctrl_c_kills(tmp_path):
    script = """
signal.signal(signal.SIGTERM, lambda *_: print("no"))
print("ready")
while True:
    time.sleep(9)
"""
    with Launch(tmp_path, script, "--workers=1") as job:
        job.read_until("ready", 2)
        job.process.send_signal(signal.SIGINT)
        job.read_until("no$", 2)
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130
    assert "ended by launcher (SIGKILL)" in job.summary("worker:0")


def test_a_killed_launcher_leaves_no_task(tmp_path):
    with Launch(tmp_path, "print('up'); time.sleep(99)", "--workers=3") as job:
        job.read_until("up$", 4)
        job.process.kill()
        wait_until_gone(job.pids.values())


def test_a_task_takes_its_children_along(tmp_path):
    script = """
if me.task_type == "worker":
    print("child", subprocess.Popen(["sleep", "99"]).pid)
    sys.exit(0)
time.sleep(1)
"""
    with Launch(tmp_path, script, "--workers=1") as job:
        output = job.read_until(r"child \d+")
        wait_until_gone([int(re.search(r"child (\d+)", output)[1])])
        assert job.end() == 0


def test_head_ends_the_job(tmp_path):
    with Launch(tmp_path, "print('up')\nwhile 1: print('line')") as job:
        job.read_until("up$")
        pids = job.pids
        job.process.stdout.close()
        assert job.process.wait(timeout=DEADLINE) == 141
        wait_until_gone(pids.values())


def test_output_that_nobody_reads(tmp_path):
    """Not even what the launcher says first."""
    with Launch(tmp_path, "", "--network=host") as job:
        job.process.stdout.close()
        assert job.process.wait(timeout=DEADLINE) == 141


# --- The network -------------------------------------------------------------

LISTEN = """
server = socket.create_server(("0.0.0.0", port()))
print("listens on", port())
signal.pause()
"""


def own_addresses():
    """Loopback, and the address of the machine's way out if there is one."""
    found = ["127.0.0.1"]
    with (
        contextlib.suppress(OSError),
        socket.socket(type=socket.SOCK_DGRAM) as s,
    ):
        s.connect(("192.0.2.77", 9))  # A documentation address; sends nothing.
        found.append(s.getsockname()[0])
    return found


def reachable(ports):
    found = []
    for address in own_addresses():
        for port in ports:
            with contextlib.suppress(OSError):
                socket.create_connection((address, port), timeout=2).close()
                found.append((address, port))
    return found


WITHOUT_PRIVILEGE = """
import sys
from tfdist.launch import command, network
enter = network._unshare_network
def unprivileged(flags):
    if flags == network._CLONE_NEWNET:
        raise PermissionError(1, "unshare")
    enter(flags)
network._unshare_network = unprivileged
sys.exit(command.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("code", [None, WITHOUT_PRIVILEGE], ids=["any", "user"])
def test_private_network_is_unreachable(tmp_path, code):
    with Launch(tmp_path, LISTEN, "--ps=1", "--workers=1", code=code) as job:
        output = job.read_until("listens on", 3)
        ports = [int(p) for p in re.findall(r"listens on (\d+)", output)]
        if "--network=host" in job.process.args:
            assert "authenticate nobody" in output
        else:
            assert "A private network: nothing outside can reach" in output
            assert "--network=host" in output
            assert reachable(ports) == []
        job.process.send_signal(signal.SIGINT)
        assert job.end() == 130


def test_tasks_reach_each_other_in_the_private_network(tmp_path):
    script = """
if me.role == "worker":
    server = socket.create_server(("", port()))
    server.accept()
    sys.exit(0)
host, port = me.tasks["worker"][0].split(":")
while True:
    try:
        socket.create_connection((host, int(port)), timeout=9)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
"""
    code, job = run(tmp_path, script, "--workers=1")
    assert code == 0
    assert "exit code 0" in job.summary("worker:0")


def test_host_network(tmp_path):
    with Launch(tmp_path, LISTEN, "--network=host") as job:
        output = job.read_until("listens on")
        assert "The host's network: TensorFlow's servers authenticate" in output
        ports = [int(re.search(r"listens on (\d+)", output)[1])]
        assert ("127.0.0.1", ports[0]) in reachable(ports)
        job.process.send_signal(signal.SIGTERM)
        assert job.end() == 143


def test_a_system_that_refuses(tmp_path):
    code = """
import sys
from tfdist.launch import command, network
def refuse():
    raise OSError("unshare: Operation not permitted")
network.enter_private_network = refuse
sys.exit(command.main(sys.argv[1:]))
"""
    got, job = run(tmp_path, "", "--workers=1", code=code)
    assert got == 1
    (line,) = job.lines_of("launch")
    assert "private network (unshare: Operation not permitted). In the" in line
    assert "whoever can reach this machine can reach them" in line
    assert line.endswith("say --network=host.")
    got, job = run(tmp_path, "", "--workers=1", "--network=host", code=code)
    assert got == 0


def test_a_refusal_leaves_the_process_where_it_was():
    code = """
import os
from tfdist.launch import network
def refuse(flags):
    network._libc.unshare(flags)  # It goes wrong only after this.
    raise PermissionError(1, "refused")
network._unshare_network = refuse
before = os.readlink("/proc/self/ns/net")
try:
    network.enter_private_network()
except OSError as error:
    print(error, os.readlink("/proc/self/ns/net") == before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout == "Operation not permitted True\n"


# --- Usage -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "a program is required"),
        (["--ps=1", "--workers=1"], "a program is required"),
        (["-m"], "a program is required"),
        (["--ps=2", "task.py"], "--ps needs --workers"),
        (["--ps=-1", "-m", "x"], "integer from 0 to 1000. Received: '-1'"),
        (["--workers=two", "-m", "x"], "Received: 'two'"),
        (["--workers=1001", "-m", "x"], "Received: '1001'"),
        (["--max_restarts=1.5", "-m", "x"], "Received: '1.5'"),
        (["--grace_secs=-1", "-m", "x"], "must be seconds"),
        (["--grace_secs=nan", "-m", "x"], "must be seconds"),
        (["--network=none", "-m", "x"], "invalid choice: 'none'"),
        (["--worker=1", "-m", "x"], "unrecognized arguments: --worker=1"),
        (["no_such_script.py"], "there is no script 'no_such_script.py'"),
    ],
)
def test_usage_errors(argv, message, capsys):
    with pytest.raises(SystemExit) as info:
        command.parse_options(argv)
    assert info.value.code == 2
    assert message in capsys.readouterr().err


def test_defaults():
    options = command.parse_options(["-m", "trainer.task", "--ps=9"])
    assert (options.ps, options.workers, options.max_restarts) == (0, 0, 3)
    assert (options.evaluator, options.network) == (False, "private")
    assert options.command == [sys.executable, "-m", "trainer.task", "--ps=9"]


def test_imports_no_tensorflow():
    code = "import sys, tfdist.launch; sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
