"""The table of cases by strategy; `tests.cases` says what a case is."""

import concurrent.futures
import functools
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.cases import STRATEGIES, Job, all_cases, outcome
from tfdist.launch.testing import LocalCluster

ROOT = Path(__file__).parents[2]
TASKS = {"all-reduce": {"workers": 1}, "ps": {"ps": 2, "workers": 2}}
DEADLINE_SECS = 1800
IDS = [f"{case.area}-{case.name}" for case in all_cases()]
EVERY = 24  # So many are one before a landing; a soak runs all.
SOURCES = sorted((ROOT / "tfdist").rglob("*.py"))
# The library's text says which, so that each change meets others.
START = zlib.crc32(b"".join(path.read_bytes() for path in SOURCES)) % EVERY


def run(directory, every, strategy):
    """What became of each case, and what the job printed."""
    command = [sys.executable, "-m", "tests.cases", f"--strategy={strategy}"]
    command.append(f"--directory={directory / strategy.replace(' ', '_')}")
    command += [f"--start={START % every}", f"--every={every}"]
    if strategy in TASKS:
        with LocalCluster(command, cwd=ROOT, **TASKS[strategy]) as job:
            job.wait(timeout_secs=DEADLINE_SECS)
            output = job.output("chief:0")
    else:
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE_SECS,
        )
        output = done.stdout
    lines = map(json.loads, re.findall(r"^CASE (.*)$", output, re.MULTILINE))
    found = {f"{line['area']}-{line['name']}": line for line in lines}
    return found, output


def table(directory, every):
    """Strategy to what `run` returns; printed as it is for people."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        runs = pool.map(functools.partial(run, directory, every), STRATEGIES)
        found = dict(zip(STRATEGIES, runs, strict=True))
    print(f"\n{'':60}", *(f"{name:12}" for name in STRATEGIES))
    refusals = set()
    for name in IDS[START % every :: every]:
        words = []
        for strategy in STRATEGIES:
            line = found[strategy][0].get(name, {"outcome": "MISSING"})
            word, _, message = line["outcome"].partition(":")
            words.append(f"{word.split()[0]:12}")
            if word == "refused":
                refusals.add(f"{name}:{message}")
        print(f"{name:60}", *words)
    print(*sorted(refusals), sep="\n")
    return found


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return table(tmp_path_factory.mktemp("cases"), EVERY)


def check(table, name, strategy):
    found, output = table[strategy]
    assert name in found, f"{name} was not run.\n{output[-5000:]}"
    assert not found[name]["outcome"].startswith("FAILED"), found[name]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", IDS[START::EVERY])
def test_works_or_is_refused(sample, name, strategy):
    check(sample, name, strategy)


@pytest.mark.slow
@pytest.mark.soak
def test_all_work_or_are_refused(tmp_path):
    """An hour."""
    whole = table(tmp_path, 1)
    for strategy in STRATEGIES:
        for name in IDS:
            check(whole, name, strategy)


@pytest.mark.slow
def test_enough_of_them():
    assert len(set(IDS)) == len(IDS) >= 450


@pytest.mark.parametrize("case", all_cases()[::80], ids=lambda case: case.name)
def test_in_one_process(case, tmp_path):
    """A few of them, for the README's test command."""
    outcome(case, Job("one process", tmp_path))
