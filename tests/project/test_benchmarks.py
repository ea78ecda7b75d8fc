"""`benchmarks.run` measures, and writes what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from benchmarks.bars import BARS
from benchmarks.commands import RunError
from benchmarks.contest import Bench, Result
from benchmarks.environments import Environments

ROOT = Path(__file__).parents[2]


def test_contenders_take_turns_and_one_that_fails_is_missing(tmp_path):
    turns = []

    def contender(name, fails_in=None):
        def measure(number):
            turns.append((name, number))
            if number == fails_in:
                raise RunError("it broke")
            return {"round": number}

        return measure

    result = Result("title", "setting")
    bench = Bench(Environments(tmp_path), rounds=3)
    measured = bench.turns(
        {"A": contender("A"), "B": contender("B", fails_in=1)}, result
    )
    assert turns == [("A", 0), ("B", 0), ("A", 1), ("B", 1), ("A", 2)]
    assert measured == {"A": [{"round": n} for n in range(3)]}
    assert result.missing == {"B": "it broke"}


def results_of(bar, value, over):
    """Results in which the medians of a bar's two figures are these."""
    results = {}
    for figure, median in ((bar.figure, value), (bar.over, over)):
        result = results.setdefault(
            figure.scenario,
            {
                "title": "t",
                "setting": "s",
                "about": {},
                "curve": None,
                "figures": [],
                "missing": {},
            },
        )
        result["figures"].append(
            {
                "case": figure.case,
                "contender": figure.contender,
                "measure": figure.measure,
                "values": [median, median - 1, median + 1],
            }
        )
    return results


@pytest.mark.parametrize("bar", BARS, ids=lambda bar: bar.text)
def test_each_bar_is_met_and_missed(bar):
    wanted = bar.most if bar.least is None else bar.least
    for sign, is_met in ((1, True), (-1, False)):
        better = sign * (1 if bar.least is not None else -1)
        value = wanted + 0.01 * better
        value = 100 + value if bar.is_difference else 100 * value
        found = bar.value(results_of(bar, value, 100.0))
        assert bar.is_met(found) is is_met


def test_the_report_has_each_ratio_beside_its_bar(tmp_path):
    [bar] = [bar for bar in BARS if bar.figure.scenario == "start_up"]
    for value, word in (
        (250, "| 2.50 x | at most 4 x | met |"),
        (500, "| 5.00 x | at most 4 x | **missed** |"),
    ):
        page = report.write(tmp_path, {}, results_of(bar, value, 100.0))
        assert f"| {bar.text} {word}" in page.read_text()
    assert report.write(tmp_path, {}, {}).read_text().count(bar.text) == 0


def test_the_best_of_several_variants_is_compared(tmp_path):
    [bar] = [
        bar
        for bar in BARS
        if bar.over.contender == "tf_keras fit"
        and bar.figure.case.startswith("100,000")
    ]
    results = results_of(bar, 300, 100)
    slow = results["wide_and_deep"]["figures"][1]
    fast = {**slow, "contender": "tf_keras fit, 10", "values": [200.0]}
    results["wide_and_deep"]["figures"].append(fast)
    assert bar.value(results) == 1.5


@pytest.mark.slow
def test_a_tiny_run_writes_figures_and_the_page(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.run", "--quick"),
            *("--only=wide_and_deep", "--contenders=tfdist"),
            f"--out={tmp_path}",
        ],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    result = json.loads((tmp_path / "wide_and_deep.json").read_text())
    assert result["missing"] == {}
    found = {f["measure"]: f["values"] for f in result["figures"]}
    for measure in (
        "examples per second",
        "CPU ms per step",
        "CPU ms per step, ps:1",
        "CPU ms per step, worker:1",
        "context switches per step",
    ):
        assert len(found[measure]) == 1
    assert found["examples per second"][0] > 0
    assert found["CPU ms per step"][0] > 0
    assert found["context switches per step"][0] > 1
    assert 0 < found["AUC"][0] < 1
    page = (tmp_path / "report.md").read_text()
    assert "## Wide and deep" in page
    assert "tensorflow 2.21" in page
    assert (tmp_path / "wide_and_deep.png").stat().st_size > 0


ROUND_TRIPS = """
import tempfile
from benchmarks import networks
with tempfile.TemporaryDirectory() as directory:
    switch = networks.compile_switch(directory)
    networks.enter()
    for delay in (0.0, 5.0):
        print(networks.round_trip_ms(switch, delay))
"""


def test_a_delay_is_what_packets_take_more():
    done = subprocess.run(
        [sys.executable, "-c", ROUND_TRIPS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.stderr.startswith(("There is no C compiler", "The system refuses")):
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    at_once, late = map(float, done.stdout.split())
    # One way and back; never earlier, whatever else this machine does.
    assert late >= 10.0
    assert late > at_once
