"""The benchmarks of the forms of replication run, and count right."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest


def run(module, *options):
    done = subprocess.run(
        [sys.executable, "-m", module, *options],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout


@pytest.mark.slow
def test_coordinator_and_clients_that_share_their_variables(tmp_path):
    """It fails itself unless the ps have counted every client's steps."""
    output = tmp_path / "rates.json"
    options = ("--workers=2", "--scenarios=empty,dense", "--rounds=1")
    rows = run(
        "benchmarks.replication", *options, "--secs=0.1", f"--json={output}"
    ).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| empty", "| dense"]
    for result in json.loads(output.read_text())["2"].values():
        assert len(result["rates"]) == 5
        assert all(rates[0] > 0 for rates in result["rates"].values())


@pytest.mark.slow
def test_towers_and_mirrored_strategy_train_alike():
    (apart,) = re.findall(r"weights +(\S+) apart", run("benchmarks.towers"))
    assert float(apart) < 1e-5
