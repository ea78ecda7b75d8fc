"""`tfdist resize`, and the workers that a launcher starts for it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.launch.test_launch import ROOT, Launch
from tfdist.launch import resize
from tfdist.launch.command import parse_options

SERVES = """
import json
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
assert len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]) == 3
print("here", flush=True)
time.sleep(300)
"""


def resized(number, launcher):
    command = ["-m", "tfdist", "resize", str(number), f"--launcher={launcher}"]
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )


def test_the_launcher_starts_and_lets_go(tmp_path):
    flags = ["--ps=1", "--workers=1:3"]
    with Launch(tmp_path, SERVES, *flags) as job:
        job.read_until(r"^\[worker:0\] here")
        assert {"worker:0", "ps:0", "chief:0"} == job.pids.keys()
        done = resized(3, job.process.pid)
        assert done.stdout.endswith(": workers: 1 -> 3\n")
        job.read_until(r"^\[worker:[12]\] here", 2)
        assert "[launch] workers: 1 -> 3\n" in job.output
        resized(2, job.process.pid)
        job.read_until(r"^\[launch\] workers: 3 -> 2")
        os.kill(
            job.pids["worker:2"], signal.SIGUSR1
        )  # As the chief lets it go.
        job.read_until("worker:2: exit code 0; the job has 2 workers.")
        # One that leaves, and is wanted again, is started again.
        resized(1, job.process.pid)
        job.read_until(r"^\[launch\] workers: 2 -> 1")
        resized(2, job.process.pid)
        job.read_until(r"^\[launch\] workers: 1 -> 2")
        before = job.pids["worker:1"]
        os.kill(before, signal.SIGUSR1)
        job.read_until(r"^\[worker:1\] here", 2)
        assert job.pids["worker:1"] != before
        refused = resized(4, job.process.pid)
        assert refused.returncode == 2
        assert "the launcher has --workers=1:3. Received: 4" in refused.stderr
        job.process.terminate()
        job.end()
        assert "no such launcher" in resized(3, job.process.pid).stderr


def test_a_launchers_file_that_somebody_has_removed():
    """Such as who tidies up the temporary files of long ago."""
    with resize.launchers_file({"workers": (1, 2)}, 30.0) as path:
        shutil.rmtree(path.parent)
        assert resize.size_in(path, {"worker": 1}) == {"worker": 1}


def test_a_file_that_is_malformed(tmp_path, capsys):
    (tmp_path / "cluster.json").write_text("{")
    with pytest.raises(SystemExit):
        resize.main(["3", f"--model_dir={tmp_path}"])
    assert "cluster.json must be a JSON object" in capsys.readouterr().err
    assert (tmp_path / "cluster.json").read_text() == "{"


def test_elsewhere(tmp_path, capsys):
    assert resize.main(["3", f"--model_dir={tmp_path}"]) == 0
    assert json.loads((tmp_path / "cluster.json").read_text()) == {"workers": 3}
    assert os.listdir(tmp_path) == ["cluster.json"]
    # What else it says stays.
    (tmp_path / "cluster.json").write_text('{"workers": 3, "min_workers": 2}')
    assert resize.main(["4", f"--model_dir={tmp_path}"]) == 0
    content = json.loads((tmp_path / "cluster.json").read_text())
    assert content == {"workers": 4, "min_workers": 2}
    assert resize.main(["--ps=2", f"--model_dir={tmp_path}"]) == 0
    content = json.loads((tmp_path / "cluster.json").read_text())
    assert content == {"workers": 4, "min_workers": 2, "ps": 2}
    capsys.readouterr()
    for argv, message in (
        (["0"], "N must be 1 or more"),
        ([], "N must be 1 or more"),
        (["2", "--ps=0"], "N must be 1 or more"),
        (["3", f"--model_dir={tmp_path}/none"], "there is no directory"),
        (["3", "--launcher=1"], "there is no such launcher"),
    ):
        with pytest.raises(SystemExit):
            resize.main(argv)
        assert message in capsys.readouterr().err


def test_flags(capsys):
    options = parse_options(["--ps=1", "--workers=2:5", "-m", "task"])
    assert (options.least_workers, options.workers) == (2, 5)
    options = parse_options(["--ps=1:2", "--workers=2", "-m", "task"])
    assert (options.least_ps, options.ps) == (1, 2)
    options = parse_options(["--workers=2", "-m", "task"])
    assert (options.least_workers, options.workers) == (2, 2)
    for flags, message in (
        (["--ps=1", "--workers=3:2"], "MIN:MAX must be"),
        (["--ps=1", "--workers=0:2"], "MIN:MAX must be"),
        (["--ps=1", "--workers=1:"], "must be an integer"),
        (["--last_call_timeout=-1"], "must be seconds, 0 or more"),
    ):
        with pytest.raises(SystemExit):
            parse_options([*flags, "-m", "task"])
        assert re.search(message, capsys.readouterr().err)
