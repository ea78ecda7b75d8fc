"""The benchmark of both forms of replication runs, and counts right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_both_forms_run_and_clients_share_their_variables(tmp_path):
    """It fails itself unless the ps have counted every client's steps."""
    output = tmp_path / "rates.json"
    options = [
        *("--workers=2", "--scenarios=empty,dense"),
        *("--rounds=1", "--secs=0.1", f"--json={output}"),
    ]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.replication", *options],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    rows = done.stdout.splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == ["| empty", "| dense"]
    for result in json.loads(output.read_text())["2"].values():
        assert len(result["rates"]) == 5
        assert all(rates[0] > 0 for rates in result["rates"].values())
