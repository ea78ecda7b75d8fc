"""Exercises of lesson 11, Vertex AI."""

from __future__ import annotations

import collections
import json
from typing import Any

import tensorflow as tf
import yaml

import tfdist
from exercises import Exercise
from tfdist.vertex.checks import problems_of_job
from tfdist.vertex.jobs import Job


def holds_them(name: str) -> bool:
    """Exercise 1, by the role that tfdist reads; with or without the CPU."""
    pools = {f"workerpool{i}": [f"a{i}:1", f"b{i}:1"] for i in range(1, 3)}
    spec = {
        "cluster": {"workerpool0": ["c:1"], **pools},
        "task": {"type": "workerpool2", "index": 1},
    }
    me = tfdist.Cluster.from_env({"CLUSTER_SPEC": json.dumps(spec)})
    device = tf.DeviceSpec.from_string(name.strip())
    on_cpu = device.device_type in (None, "CPU")
    return on_cpu and (device.job, device.task) == (me.task_type, me.task_index)


def of_four_machines(job: Job) -> bool:
    """Exercise 2, by the job file that is made of it."""
    spec = job.spec()
    pools, scheduling = spec["workerPoolSpecs"], spec["scheduling"]
    machines = collections.Counter()
    for pool in pools:
        what = tuple(sorted(map(str, pool["machineSpec"].values())))
        machines[what] += pool["replicaCount"]
    wanted = tuple(sorted(["n1-standard-16", "NVIDIA_TESLA_T4", "2"]))
    hours = int(scheduling["timeout"].removesuffix("s")) / 3600
    return (
        machines == {wanted: 4}
        and (job.ps, job.evaluator) == (0, False)
        and (scheduling["strategy"], hours) == ("SPOT", 6)
    )


def is_mended(text: str) -> bool:
    """Exercise 3, by the checks that precede a submission."""
    spec = yaml.safe_load(text)
    if problems := problems_of_job(spec):
        raise ValueError(problems[0])
    pools = spec["workerPoolSpecs"]
    (variable,) = pools[0]["containerSpec"]["env"]
    kept = variable["name"] == "LOG" and str(variable["value"]) == "1"
    return kept and [pool["replicaCount"] for pool in pools] == [1, 2, 1]


def is_tried_again(record: dict[str, Any]) -> bool:
    """Exercise 4: the chief gave up, and asks for another try."""
    if record["replica"] != "chief 0":
        raise ValueError("the record of the chief is asked for")
    return record["code"] in (134, 139) and "saves" not in record


EXERCISES = {
    1: Exercise(
        (
            "The number of the pool says the role. Which role is pool 2?",
            "Pools 0 to 3 are the chief, workers, parameter servers and the "
            "evaluator. TensorFlow's short name of the role is the job.",
        ),
        is_right=holds_them,
    ),
    2: Exercise(
        (
            "Who trains in an all-reduce job besides the workers?",
            "The chief is one of the four machines. `Machine` holds the type "
            "and the accelerators; `spot` and `timeout_secs` belong to the "
            "job.",
        ),
        is_right=of_four_machines,
    ),
    3: Exercise(
        (
            "The message names one mistake. Correct it and run it again: there "
            "may be another.",
            "Look at the spelling of the first key, at the type of the "
            "variable's value, at the empty pool and at the bucket.",
        ),
        is_right=is_mended,
    ),
    4: Exercise(
        (
            "`absent` keeps a task from being started. This time, do not call "
            "`tasks.start`; wait for the chief's record.",
            "Add the flag to `flags`, wait with "
            "`tasks.wait_for_line('chief:0', '^{\"replica\"', "
            "timeout_secs=240)`, and take the last of "
            "`course.records(tasks.output('chief:0'))`.",
        ),
        is_right=is_tried_again,
    ),
    5: Exercise(
        (
            "How many machines are lost in twelve hours, on average? The table "
            "of this notebook has the chance of more than six.",
            "Say which pools cost a restart of the job when they are lost, who "
            "submits it again, and what the best time between checkpoints is "
            "(notebook 7). Write at least 25 words.",
        ),
    ),
}
