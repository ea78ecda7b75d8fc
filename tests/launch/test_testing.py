import contextlib
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfdist._tf.waiting import wait_for
from tfdist.launch import testing
from tfdist.launch.testing import (
    Fault,
    LocalCluster,
    NotRunningError,
    assert_nothing_left,
)

# Faults at times of their own, which a busy machine would shift.
pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
DEADLINE = 30.0

# What a task's script begins with.
PROLOGUE = """
import json, os, signal, socket, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
job, index = config["task"]["type"], config["task"]["index"]
def address(job, index=0):
    host, port = config["cluster"][job][index].split(":")
    return host, int(port)
print("up", os.getpid(), flush=True)
"""
SLEEP = "time.sleep(99)"
# A chief whose job takes three seconds, others that only stay.
COUNT = """
for step in range(1, 61 if job == "chief" else 9999):
    time.sleep(0.05)
    print(f"step {step:4d} of 60 ({step:3d} %), 20 steps/s", flush=True)
"""


def cluster(script, **kwargs):
    return LocalCluster([sys.executable, "-c", PROLOGUE + script], **kwargs)


def state(pid):
    """The letter of /proc; None for a process that is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[0]


def wait_until(condition):
    assert wait_for(condition, DEADLINE, poll_secs=0.01)


def wait_until_up(job):
    """Each task prints its process id before anything is done to it."""
    for task in job.ports():
        job.wait_for_line(task, r"up \d+")


# --- Faults as data ----------------------------------------------------------


def test_a_kind_of_fault_that_is_none():
    with pytest.raises(ValueError, match=r"'kill', 'freeze', .*'explode'"):
        Fault("explode", "ps:0", at_step=1)


@pytest.mark.parametrize(
    ("step", "due"), [(None, False), (4, False), (5, True), (6, True)]
)
def test_when_a_fault_is_due(step, due):
    assert Fault("kill", "ps:0", at_step=5).is_due(step) is due


# --- The cluster -------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"command": "python job.py"}, "must be a list of the program"),
        ({"command": []}, "must be a list of the program"),
        ({"network": "none"}, "Received: network='none'"),
        ({"absent": ["ps:7"]}, "one of chief:0. Received: task='ps:7'"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        LocalCluster(**{"command": ["true"], **arguments})


def test_a_command_that_does_not_exist():
    with pytest.raises(FileNotFoundError, match="no_such_program"):
        LocalCluster(["no_such_program"])


def test_every_task_gets_its_place(tmp_path):
    script = "print(os.environ['TF_CONFIG'], os.getcwd(), flush=True)"
    with cluster(
        script + "\nif job != 'chief': " + SLEEP,
        ps=2,
        workers=1,
        evaluator=True,
        log_dir=tmp_path / "logs",
        cwd=tmp_path,
    ) as job:
        assert job.wait(timeout_secs=DEADLINE) == 0
        ports = job.ports()
        for task in ports:
            found = job.wait_for_line(task, r"(\{.*\}) (.*)")
            config = json.loads(found[1])
            assert Path(found[2]) == tmp_path
            assert "{type}:{index}".format(**config["task"]) == task
            assert config["cluster"] == {
                kind: [f"127.0.0.1:{ports[name]}" for name in names]
                for kind, names in {
                    "chief": ["chief:0"],
                    "worker": ["worker:0"],
                    "ps": ["ps:0", "ps:1"],
                    "evaluator": ["evaluator:0"],
                }.items()
            }
        assert job.exit_codes() == {t: [0] * (t == "chief:0") for t in ports}
    assert len(set(ports.values())) == 5
    assert_nothing_left(job)
    assert (tmp_path / "logs" / "worker-0.log").read_text().startswith("up")
    assert job.output("worker:0").startswith("up")


def test_the_caller_stays_in_its_network():
    network = os.readlink("/proc/self/ns/net")
    with cluster(SLEEP) as job:
        own = os.readlink(f"/proc/{job.pid('chief:0')}/ns/net")
        assert (own != network) is job.private
    assert os.readlink("/proc/self/ns/net") == network


LISTEN = (
    """
server = socket.create_server(address("chief"))
print("listens", flush=True)
"""
    + SLEEP
)


def can_connect(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=2).close()
        return True
    return False


@pytest.mark.parametrize("network", ["private", "host"])
def test_networks(network):
    with cluster(LISTEN, network=network) as job:
        job.wait_for_line("chief:0", "listens")
        assert can_connect(job.ports()["chief:0"]) is not job.private
        assert network == "private" or not job.private
    assert not can_connect(job.ports()["chief:0"])
    assert_nothing_left(job)


REFUSES = """
import ctypes, os, sys
libc = ctypes.CDLL(None)
uid, gid = os.geteuid(), os.getegid()
if libc.unshare(0x10000000) != 0:
    sys.exit(77)
for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"),
                   ("gid_map", f"0 {gid} 1")):
    with open(f"/proc/self/{name}", "w") as file:
        file.write(text)
with open("/proc/sys/user/max_net_namespaces", "w") as file:
    file.write("0")
from tfdist.launch import testing
with testing.LocalCluster(["sleep", "99"]) as cluster:
    print(cluster.private)
    try:
        cluster.cut_network(for_secs=1)
    except RuntimeError as error:
        print(error)
"""


def test_a_system_that_refuses_a_private_network():
    done = subprocess.run(
        [sys.executable, "-c", REFUSES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    if done.returncode == 77:
        pytest.skip("this system has no user namespaces to take away")
    assert "refuses a private network (No space left" in done.stderr
    assert "authenticate nobody" in done.stderr
    assert done.stdout.startswith("False\nThe cluster is in the host's network")
    assert done.returncode == 0


# --- Waiting -----------------------------------------------------------------


def test_steps_and_lines():
    script = """
print("no number: step x\\nsteps 99", flush=True)
for step in (0, 500, 1000):
    print(f"step {step:4d} of 1000 ({step // 10:3d} %),  100 steps/s")
    sys.stdin.read(); sys.stdout.flush(); time.sleep(0.2)
print("step 1100, 90 steps/s")
print("half a li", end="", flush=True); time.sleep(0.5); print("ne")
"""
    with cluster(script) as job:
        assert job.step is None or job.step == 0
        assert job.wait_until_step(400) == 500
        assert (
            job.wait_for_line("chief:0", r"step +(\d+)", count=3)[1] == "1000"
        )
        assert job.wait_for_line("chief:0", "half a li.*")[0] == "half a line"
        assert job.step == 1100
    assert job.step == 1100


def test_another_pattern_of_steps():
    script = "print('epoch 7: at 30', flush=True);" + SLEEP
    with cluster(script, step_pattern=r"at (\d+)$") as job:
        assert job.wait_until_step(30) == 30


def test_waiting_in_vain():
    script = f"""
print("the last words", flush=True)
if job == "worker": {SLEEP}
sys.exit(3)
"""
    with cluster(script, workers=1) as job:
        job.wait_for_line("worker:0", "the last words")
        with pytest.raises(TimeoutError, match=r"within 0.2 s\."):
            job.wait_for_line("worker:0", "nothing", timeout_secs=0.2)
        with pytest.raises(
            RuntimeError, match=r"chief:0 ended \(exit code 3\)"
        ):
            job.wait_until_step(1)
        with pytest.raises(RuntimeError, match=r"ended .* without 'nothing'"):
            job.wait_for_line("chief:0", "nothing")
        with pytest.raises(ValueError, match=r"one of chief:0, worker:0\. R"):
            job.output("ps:0")


def test_a_job_that_does_not_end():
    with (
        cluster(SLEEP) as job,
        pytest.raises(TimeoutError, match="did not come to the end of the job"),
    ):
        job.wait(timeout_secs=0.1)


def test_an_error_in_the_block_shows_the_output():
    error = KeyError("mine")
    with contextlib.suppress(KeyError), cluster(SLEEP) as job:
        wait_until_up(job)
        raise error
    (note,) = error.__notes__
    assert re.fullmatch(r"chief:0: pid (\d+)\n    up \1", note)
    assert_nothing_left(job)


# --- Injectors ---------------------------------------------------------------


@pytest.fixture(scope="module")
def idle():
    """Tasks that wait; whoever takes one down starts it again."""
    with cluster(SLEEP, ps=1, workers=1) as job:
        yield job
    assert_nothing_left(job)


@pytest.fixture
def job(idle):
    for task in idle.ports():
        if idle.pid(task) is None:
            idle.start(task)
        count = len(idle.exit_codes()[task]) + 1
        idle.wait_for_line(task, r"up \d+", count=count)
    return idle


def test_kill(job):
    pid = job.pid("worker:0")
    ends = len(job.exit_codes()["worker:0"])
    injection = job.kill("worker:0")
    assert state(pid) is None
    assert job.pid("worker:0") is None
    assert job.exit_codes()["worker:0"][ends:] == [-9]
    assert injection is job.injections[-1]
    assert injection.secs > 0
    assert dataclasses.replace(injection, secs=0) == testing.Injection(
        "kill", "worker:0", pid, None, 0, "SIGKILL"
    )
    with pytest.raises(NotRunningError, match="is not running: SIGKILL"):
        job.kill("worker:0")


def test_freeze_and_resume(job):
    pid = job.pid("ps:0")
    assert job.freeze("ps:0").pid == pid
    assert state(pid) == "T"
    with pytest.raises(NotRunningError, match="frozen already"):
        job.freeze("ps:0")
    assert job.resume("ps:0").effect == "no thread stopped"
    assert state(pid) in ("R", "S")
    job.freeze("ps:0", for_secs=0.1)
    wait_until(lambda: state(pid) in ("R", "S"))


def test_a_frozen_task_dies(job):
    pid = job.pid("ps:0")
    job.freeze("ps:0", for_secs=0.3)
    job.kill("ps:0", for_secs=0.01)
    assert state(pid) is None
    wait_until(lambda: job.pid("ps:0"))


def test_restart(job):
    before, port = job.pid("ps:0"), job.ports()["ps:0"]
    job.kill("ps:0", for_secs=0.0)
    wait_until(lambda: job.pid("ps:0"))
    after = job.pid("ps:0")
    assert after not in (before, None)
    assert job.ports()["ps:0"] == port
    assert state(before) is None
    with pytest.raises(RuntimeError, match=f"ps:0 runs already, pid {after}"):
        job.start("ps:0")


@pytest.mark.parametrize(
    ("handler", "effect", "code"),
    [("sys.exit(7)", "exit code 7", 7), ("None", "SIGKILL", -9)],
)
def test_terminate(handler, effect, code):
    script = f"""
signal.signal(signal.SIGTERM, lambda *_: {handler})
print("ready", flush=True)
while True: {SLEEP}
"""
    with cluster(script, workers=1) as job:
        job.wait_for_line("worker:0", "ready")
        assert job.terminate("worker:0", grace_secs=0.5).effect == effect
        assert job.exit_codes()["worker:0"] == [code]


def test_unknown_tasks(job):
    for method in (job.kill, job.freeze, job.terminate, job.pid):
        with pytest.raises(ValueError, match="Received: task='worker:9'"):
            method("worker:9")


# --- Restarts ----------------------------------------------------------------

ENDS = """
if job == "chief": time.sleep(99)
time.sleep(0.2)
sys.exit({"ps": 3, "worker": 0}[job])
"""


def test_what_fails_comes_back():
    with cluster(ENDS, ps=2, workers=1, restart_secs=0.1) as job:
        job.set_restart_secs("ps:1", None)
        wait_until_up(job)
        port = job.ports()["ps:0"]
        job.kill("chief:0")
        job.wait_for_line("chief:0", r"up \d+", count=2)
        job.wait_for_line("ps:0", r"up \d+", count=3)
        assert job.exit_codes()["chief:0"] == [-9]
        assert job.exit_codes()["ps:0"][:2] == [3, 3]
        assert job.exit_codes()["ps:1"] == [3]
        assert job.exit_codes()["worker:0"] == [0]
        assert job.ports()["ps:0"] == port


def test_nothing_comes_back_by_default():
    with cluster(ENDS, ps=1, workers=1) as job:
        codes = {"chief:0": [], "worker:0": [0], "ps:0": [3]}
        wait_until(lambda: job.exit_codes() == codes)
        job.kill("chief:0")
        assert job.wait(timeout_secs=DEADLINE) == -9
        assert job.exit_codes() == {**codes, "chief:0": [-9]}


def test_the_job_ends_with_its_chief():
    script = f"if job == 'chief': sys.exit(5)\n{SLEEP}"
    with cluster(script, workers=1, restart_secs=0.0) as job:
        assert job.wait(timeout_secs=DEADLINE) == 5
        job.kill("worker:0")
        with pytest.raises(RuntimeError, match="ended"):
            job.wait_for_line("worker:0", r"up \d+", count=2)


# --- Late and second tasks ---------------------------------------------------


def test_absent_and_additional_tasks():
    script = f"print(os.environ['TF_CONFIG'], flush=True);{SLEEP}"
    with cluster(script, workers=2, absent=["worker:1"]) as job:
        assert job.pid("worker:1") is None
        pid = job.start("worker:1")
        assert job.wait_for_line("worker:1", r"up (\d+)")[1] == str(pid)
        names = [
            job.add_task("chief"),
            job.add_task("chief", address_of="chief:0"),
            job.add_task("worker", command=["sh", "-c", "echo $TF_CONFIG"]),
        ]
        assert names == ["chief:1", "chief:2", "worker:2"]
        told = {
            name: json.loads(job.wait_for_line(name, r"\{.*\}")[0])
            for name in ("chief:0", *names)
        }
        ports = job.ports()
        with pytest.raises(ValueError, match="master"):
            job.add_task("master")
    assert told["chief:2"] == told["chief:0"]
    assert told["chief:1"]["task"] == told["chief:0"]["task"]
    for name, job_name in (("chief:1", "chief"), ("worker:2", "worker")):
        own = told[name]["cluster"].pop(job_name)
        common = told["chief:0"]["cluster"].copy()
        known = common.pop(job_name)
        assert told[name]["cluster"] == common
        assert own[-1] == f"127.0.0.1:{ports[name]}"
        assert own[:-1] == (known if job_name == "worker" else [])
    assert told["worker:2"]["task"] == {"type": "worker", "index": 2}


# --- The network -------------------------------------------------------------

PING = """
if job == "worker":
    server = socket.create_server(address("worker"))
    print("listens", flush=True)
    while True:
        peer, _ = server.accept()
        while data := peer.recv(99):
            peer.sendall(data)
for _ in range(1000):
    try:
        peer = socket.create_connection(address("worker"), timeout=99)
        break
    except ConnectionRefusedError:
        time.sleep(0.01)
for step in range(1, 10000):
    peer.sendall(b"ping")
    peer.recv(99)
    print(f"step {step}", flush=True)
    time.sleep(0.01)
"""


def test_a_network_that_is_cut_and_mended():
    with cluster(PING, workers=1) as job:
        if not job.private:
            pytest.skip("this system has no private network to cut")
        job.wait_until_step(3)
        job.cut_network(for_secs=1)
        step = job.wait_until_step(job.step)
        deadline = time.monotonic() + 0.5
        while time.monotonic() < deadline:
            time.sleep(0.02)
            assert job.step <= step + 1  # Its line was on the way.
        job.wait_until_step(step + 5)
        step = job.step
        job.cut_network(for_secs=0.2)
        job.wait_until_step(step + 5)
        assert job.exit_codes() == {"chief:0": [], "worker:0": []}
        kinds = [injection.kind for injection in job.injections]
        assert kinds == ["cut_network", "cut_network"]


# --- Runs with faults --------------------------------------------------------


@pytest.mark.slow
def test_a_run_with_faults():
    faults = [
        Fault("kill", "ps:0", at_step=6, for_secs=0.0),
        Fault("kill", "worker:0", at_step=20, for_secs=0.2),
        Fault("freeze", "worker:1", at_step=20, for_secs=0.2),
        Fault("freeze", "chief:0", at_step=25, for_secs=0.2),
        Fault("kill", "worker:0", at_step=20, for_secs=0.2),
        Fault("terminate", "ps:0", at_step=30),
    ]
    with cluster(COUNT, ps=1, workers=2, restart_secs=0.1) as job:
        wait_until_up(job)
        done = job.run(faults, timeout_secs=DEADLINE)
        assert job.wait(timeout_secs=0) == 0
        codes = job.exit_codes()
    assert done == job.injections
    assert sorted((d.kind, d.task) for d in done) == sorted(
        (fault.kind, fault.task) for fault in faults
    )
    assert codes == {
        "chief:0": [0],
        "ps:0": [-9, -15],
        "worker:0": [-9, -9],
        "worker:1": [],
    }
    for injection in done:
        (at_step,) = {
            fault.at_step
            for fault in faults
            if (fault.kind, fault.task) == (injection.kind, injection.task)
        }
        assert injection.step >= at_step
    # Those of one step come together; the second for one task waits for it.
    first = [d.secs for d in done if d.task in ("worker:0", "worker:1")]
    assert first[1] - first[0] < first[2] - first[1]
    assert first[2] - first[0] >= 0.2
    assert_nothing_left(job)


def test_a_fault_that_comes_too_late():
    faults = [Fault("kill", "worker:0", at_step=2)]
    script = f"if job == 'worker': {SLEEP}\nprint('step 1')"
    with (
        cluster(script, workers=1) as job,
        pytest.raises(RuntimeError, match=r"ended before .*at_step=2"),
    ):
        job.run(faults, timeout_secs=DEADLINE)


def test_faults_of_unknown_tasks():
    with (
        cluster(SLEEP) as job,
        pytest.raises(ValueError, match="Received: task='ps:0'"),
    ):
        job.run([Fault("kill", "ps:0", at_step=1)], timeout_secs=DEADLINE)


# --- Nothing is left ---------------------------------------------------------

# A child in the task's session and a daemon outside it, both deaf to SIGTERM.
CHILDREN = (
    """
deaf = "trap '' TERM; while :; do sleep 1; done"
daemon = "echo daemon $$; exec sh -c \\"$0\\""
print("child", subprocess.Popen(["sh", "-c", deaf]).pid, flush=True)
subprocess.run(["sh", "-c", 'setsid sh -c "$0" "$1" & :', daemon, deaf])
"""
    + SLEEP
)


def descendants(job):
    return [
        int(job.wait_for_line(task, rf"{what} (\d+)")[1])
        for task in job.ports()
        for what in ("up", "child", "daemon")
    ]


def test_children_go_with_the_cluster():
    with cluster(CHILDREN, workers=1) as job:
        pids = descendants(job)
        job.freeze("worker:0")
        assert [state(pid) for pid in pids].count(None) == 0
        with pytest.raises(AssertionError, match="is not closed"):
            assert_nothing_left(job)
    assert {state(pid) for pid in pids} == {None}
    assert_nothing_left(job)
    job.close()  # Again, which does nothing.
    with pytest.raises(RuntimeError, match="The cluster is closed"):
        job.kill("worker:0")


def test_children_go_with_their_task():
    with cluster(CHILDREN, workers=1) as job:
        child = int(job.wait_for_line("worker:0", r"child (\d+)")[1])
        job.kill("worker:0")
        wait_until(lambda: state(child) in (None, "Z"))


CALLER = """
import sys, threading, time
from tfdist.launch import testing
def start():
    global cluster
    cluster = testing.LocalCluster(sys.argv[2:], workers=1, log_dir=sys.argv[1])
starter = threading.Thread(target=start)  # It ends; its cluster does not.
starter.start(); starter.join()
for task in ("chief:0", "worker:0"):
    cluster.wait_for_line(task, "daemon")
    print(cluster.output(task), flush=True)
cluster.freeze("worker:0")
print("frozen", flush=True)
time.sleep(99)
"""


def test_a_killed_caller_leaves_no_task(tmp_path):
    command = [sys.executable, "-c", PROLOGUE + CHILDREN]
    with subprocess.Popen(
        [sys.executable, "-c", CALLER, str(tmp_path), *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as caller:
        output = "".join(iter(caller.stdout.readline, "frozen\n"))
        caller.kill()
    pids = re.findall(r"(?:up|child|daemon) (\d+)", output)
    assert len(pids) == 6
    wait_until(lambda: {state(pid) for pid in pids} == {None})


def test_a_killed_caller_leaves_no_file(tmp_path):
    """As a notebook's kernel that is started again; without a `log_dir`."""
    program = (
        "import sys, time; from tfdist.launch import testing; cluster = "
        'testing.LocalCluster([sys.executable, "-c", "print(1)"]); '
        "print(cluster.log_dir, flush=True); time.sleep(99)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as caller:
        assert caller.stdout.readline().startswith(str(tmp_path))
        assert len(list(tmp_path.iterdir())) == 1
        caller.kill()
    wait_until(lambda: not list(tmp_path.iterdir()))


def test_a_killed_supervisor_leaves_no_task():
    with cluster(SLEEP, workers=1) as job:
        wait_until_up(job)
        pids = [job.pid(task) for task in job.ports()]
        job.freeze("worker:0")
        os.kill(job._client.process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="supervising process has died"):
            job.kill("chief:0")
        with pytest.raises(RuntimeError, match="ended with SIGKILL"):
            job.close()
        wait_until(lambda: {state(pid) for pid in pids} == {None})
        job._client.process.returncode = 0  # For the end of the block.


def test_an_interrupted_request_ends_the_cluster():
    with cluster(SLEEP) as job:
        wait_until_up(job)
        pid, supervisor = job.pid("chief:0"), job._client.process.pid
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            os.kill(supervisor, signal.SIGSTOP)  # It does not answer.
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                job.ports()
        finally:
            signal.signal(signal.SIGALRM, before)
            os.kill(supervisor, signal.SIGCONT)
        wait_until(lambda: state(pid) is None)
        with pytest.raises(RuntimeError, match="The cluster is closed, since"):
            job.ports()


def test_a_file_that_is_left_is_found():
    with cluster(SLEEP) as job:
        pass
    assert_nothing_left(job)
    job.log_dir.mkdir()
    with pytest.raises(AssertionError, match=f"{job.log_dir} is left"):
        assert_nothing_left(job)
    job.log_dir.rmdir()


# --- A real TensorFlow server ------------------------------------------------

PROBE = """
from tfdist.cluster import probing, servers
from tfdist.cluster.spec import Cluster
cluster = Cluster.from_env()
if cluster.role == "ps":
    servers.serve(cluster)
before = None
while True:
    state = probing.probe(cluster.tasks["ps"][0], timeout_secs=0.5)
    if state is not before:
        print("ps:0 is", state.name, flush=True)
    before = state
    time.sleep(0.02)
"""


@pytest.fixture(scope="module")
def tensorflow():
    """A parameter server, and a chief that probes it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        job = cluster(PROBE, ps=1, workers=1, absent=["worker:0"])
    with job:
        job.wait_for_line("chief:0", "ps:0 is LIVE")
        yield job
    assert_nothing_left(job)


def becomes(job, state, inject):
    """Injects, and waits until the chief's probe finds another state."""
    line = f"ps:0 is {state}"
    count = job.output("chief:0").count(line)
    inject("ps:0")
    return job.wait_for_line("chief:0", line, count=count + 1)


def test_a_frozen_tensorflow_server(tensorflow):
    assert becomes(tensorflow, "FROZEN", tensorflow.freeze)
    assert becomes(tensorflow, "LIVE", tensorflow.resume)


def test_a_killed_tensorflow_server(tensorflow):
    assert becomes(tensorflow, "DEAD", tensorflow.kill)


@pytest.mark.slow
def test_a_terminated_tensorflow_server(tensorflow):
    if tensorflow.pid("ps:0") is None:
        assert becomes(tensorflow, "LIVE", tensorflow.start)
    assert becomes(tensorflow, "DEAD", tensorflow.terminate)


def test_imports_no_tensorflow():
    code = "import sys; from tfdist import testing; "
    code += "sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
