"""Stands in for Vertex AI: runs `trainer.task` as the service runs a replica.

Usage: as_vertex.py BASE_OUTPUT_DIR FLAG..., as every task of a local cluster.
"""

import json
import os
import subprocess
import sys
import time

JOBS = ("chief", "worker", "ps", "evaluator")  # Of the worker pools 0 to 3.
# What a replica logs when it misses another one, and when it saves.
EVENTS = {"misses": "Waiting for", "saves": "Saved"}


def variables(
    cluster: dict[str, list[str]], job: str, index: int, base: str
) -> dict[str, str]:
    """What the service sets in a replica.

    Args:
        cluster: Addresses by job.
        job: Whose replica it is.
        index: Its index.
        base: The job file's `baseOutputDirectory`.
    """
    found = {
        "AIP_MODEL_DIR": f"{base}/model/",
        "AIP_CHECKPOINT_DIR": f"{base}/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": f"{base}/logs/",
    }
    pools = {f"workerpool{JOBS.index(name)}": cluster[name] for name in cluster}
    task = {"type": f"workerpool{JOBS.index(job)}", "index": index}
    spec = {"cluster": pools, "environment": "cloud", "task": task}
    found["CLUSTER_SPEC"] = json.dumps(spec)
    if sum(map(len, cluster.values())) > 1:
        trains = {k: v for k, v in cluster.items() if k != "evaluator"}
        task = {"type": job, "index": index, "cloud": "1d969d3ba6"}
        config = {"cluster": trains, "environment": "cloud", "task": task}
        found["TF_CONFIG"] = json.dumps(config)
    return found


def main(base: str, flags: list[str]) -> int:
    """Runs the program; says when it began and ended, and how."""
    config = json.loads(os.environ["TF_CONFIG"])  # The local cluster's.
    job, index = config["task"]["type"], config["task"]["index"]
    row = {"replica": f"{job} {index}", "start": time.time()}
    with subprocess.Popen(
        [sys.executable, "-m", "trainer.task", *flags],
        env=os.environ | variables(config["cluster"], job, index, base),
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        for line in program.stdout:
            for event, text in EVENTS.items():
                if text in line:
                    row.setdefault(event, time.time())
            print(line, end="", flush=True)
    row |= {"end": time.time(), "code": program.returncode}
    print(json.dumps(row), flush=True)
    return program.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
