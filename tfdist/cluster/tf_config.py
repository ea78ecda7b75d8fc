"""Reads `TF_CONFIG`, `CLUSTER_SPEC` and `cluster.json`, which are JSON.

Malformed input raises a ValueError that quotes the offending part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import re
from collections.abc import Mapping
from typing import Any

TRAINING_JOBS = ("chief", "worker", "ps")
DATA_JOBS = ("dispatcher", "data_worker")
JOBS = (*TRAINING_JOBS, "evaluator", *DATA_JOBS)

_NAMES = {
    "TF_CONFIG": {**{job: job for job in JOBS}, "master": "chief"},
    "CLUSTER_SPEC": {f"workerpool{i}": job for i, job in enumerate(JOBS[:4])},
}
"""Maps each variable's job names to ours."""

_EXAMPLES = {
    "TF_CONFIG": (
        '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", '
        '"host2:2222"], "ps": ["host3:2222"]}, '
        '"task": {"type": "worker", "index": 0}}'
    ),
    "CLUSTER_SPEC": (
        '{"cluster": {"workerpool0": ["host0:2222"], "workerpool1": '
        '["host1:2222"], "workerpool2": ["host2:2222"]}, '
        '"task": {"type": "workerpool1", "index": 0}}'
    ),
}

SIZE_FILE = "cluster.json"
"""The file that sets how many workers train; see `tfdist.cluster.size`."""

SIZE_VARIABLE = "TFDIST_CLUSTER_FILE"
"""The environment variable with the path of the launcher's size file."""

LAST_CALL_SECS = 30.0
"""How long an all-reduce job waits for more workers than it needs."""

Jobs = dict[str, dict[int, str]]
"""Our name of each job -> index, in ascending order -> address."""


def malformed(variable: str, error: ValueError) -> ValueError:
    """An error that names the variable and shows a valid value."""
    return ValueError(
        f"{variable} is malformed. {error}\n"
        f"A right one: {variable}='{_EXAMPLES[variable]}'"
    )


def parse(variable: str, text: str) -> tuple[Jobs, str | None, Any]:
    """Returns the jobs, and this task's type and index (None if not given)."""
    try:
        config = json.loads(text, object_pairs_hook=_unique)
    except (json.JSONDecodeError, RecursionError) as error:
        near = text[max(0, getattr(error, "pos", 0) - 20) :]
        raise wrong(f"It must be JSON ({error}).", near) from None
    if not isinstance(config, dict):
        raise wrong(
            'It must be a JSON object with the keys "cluster" and "task".',
            config,
        )
    for key in config.keys() - {"cluster", "task"}:
        for meant in difflib.get_close_matches(
            key.lower(), ["cluster", "task"]
        ):
            raise wrong(f'A key must be spelled "{meant}".', key)
    jobs = by_index(_object(config, "cluster"), variable)
    own = _object(config, "task")
    return jobs, job_name(own.get("type"), variable), own.get("index")


def _object(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """The object under `key`; empty when it is missing or null."""
    value = config.get(key)
    if value is not None and not isinstance(value, dict):
        raise wrong(f'"{key}" must be a JSON object.', {key: value})
    return value or {}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"The key {_quote(key)} is given twice.")
    return dict(pairs)


def job_name(name: object, variable: str = "TF_CONFIG") -> str | None:
    """Our name of a job; None if `name` is empty."""
    if name is None or name == "":
        return None
    names = _NAMES[variable]
    if not isinstance(name, str) or name not in names:
        known = ", ".join(f'"{known}"' for known in names)
        raise wrong(f"A job must be one of {known}.", name)
    return names[name]


def by_index(jobs: Mapping[str, Any], variable: str = "TF_CONFIG") -> Jobs:
    """Renames jobs and numbers their tasks; drops jobs without tasks."""
    result: Jobs = {}
    for name, entry in jobs.items():
        job = job_name(name, variable)
        if job is None:
            raise wrong("A job must have a name.", jobs)
        tasks = _number(name, entry)
        if tasks and job in result:
            raise wrong(
                'The job "chief" may be called "master", but not both may be '
                "given.",
                jobs,
            )
        if tasks:
            result[job] = dict(sorted(tasks.items()))
    return result


def _number(name: str, entry: object) -> dict[int, str]:
    """The tasks of one job by index, from a list or a sparse object."""
    if isinstance(entry, list | tuple):
        return dict(enumerate(entry))
    if not isinstance(entry, Mapping):
        raise wrong(
            f'The job "{name}" must be a list of addresses, such as '
            '["host:2222"].',
            {name: entry},
        )
    tasks: dict[int, str] = {}
    for key, address in entry.items():
        index = task_index(key, f'An index in the job "{name}"')
        if index in tasks:
            raise wrong(
                f'The job "{name}" has two tasks with the index {index}.', entry
            )
        tasks[index] = address
    return tasks


def task_index(value: object, what: str = 'The "index" of "task"') -> int:
    """A task index from a JSON number or a string of digits."""
    if isinstance(value, str) and re.fullmatch("[0-9]{1,9}", value):
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    raise wrong(f"{what} must be a non-negative integer, such as 0.", value)


def own_task(
    jobs: Jobs, task_type: str | None, index: object
) -> tuple[str, int]:
    """Fills in what `task` omits if there is only one possibility."""
    nodes = [(job, i) for job in jobs for i in jobs[job]]
    for key, value in (("type", task_type), ("index", index)):
        if len(nodes) > 1 and value is None:
            raise ValueError(
                f'"task" must have the key "{key}", because "cluster" has '
                f'{len(nodes)} tasks. Expected, for example: "task": '
                '{"type": "worker", "index": 0}.'
            )
    only_type, only_index = nodes[0] if nodes else ("chief", 0)
    if index is None:
        index = only_index if task_type in (None, only_type) else 0
    return task_type or only_type, task_index(index)


@dataclasses.dataclass(frozen=True)
class Size:
    """The contents of a `cluster.json`."""

    workers: int | None  # Number of workers; None: all.
    ps: int | None  # Number of parameter servers; None: all.
    # The fewest workers of an all-reduce job; None: `workers`.
    min_workers: int | None
    last_call_timeout: float  # Seconds to wait for more than `min_workers`.


# Other keys in a launcher's file: the limits that `tfdist resize` enforces.
_LAUNCHERS = "max_workers", "min_ps", "max_ps"


def parse_size(text: str, path: str) -> Size:
    """Parses the text of a `cluster.json`; ValueError if it is malformed.

    >>> parse_size('{"workers": 3}', "cluster.json")
    Size(workers=3, ps=None, min_workers=None, last_call_timeout=30.0)
    """
    given = None
    with contextlib.suppress(ValueError):
        given = json.loads(text)
    values = given if isinstance(given, dict) else {}
    names = "workers", "ps", "min_workers"
    numbers = {name: values[name] for name in names if name in values}
    secs: Any = values.get("last_call_timeout", LAST_CALL_SECS)
    if (
        not {"workers", "ps"} & {*numbers}
        or values.keys() - {*names, *_LAUNCHERS, "last_call_timeout"}
        or not all(type(n) is int and n >= 1 for n in numbers.values())
        or type(secs) not in (int, float)
        or not 0 <= secs < float("inf")
    ):
        raise ValueError(
            f'{path} must say how many workers train, as {{"workers": 3}}, or '
            'how many "ps"; for all-reduce also "min_workers", 1 or more, and '
            f'"last_call_timeout" in seconds. Received: {text[:80]!r}.'
        )
    workers, ps, least = map(numbers.get, names)
    return Size(workers, ps, least, float(secs))


def as_list(tasks: Mapping[int, str]) -> list[str] | dict[int, str]:
    """The tasks of a job in JSON form: a list if there are no gaps."""
    if list(tasks) == list(range(len(tasks))):
        return list(tasks.values())
    return dict(tasks)


def wrong(problem: str, received: object) -> ValueError:
    """An error that quotes the offending part."""
    return ValueError(f"{problem} Received: {_quote(received)}.")


def _quote(value: object) -> str:
    """The JSON text of a value, truncated to a readable length."""
    text = json.dumps(value, default=repr)
    return text if len(text) <= 160 else text[:160] + " ..."
