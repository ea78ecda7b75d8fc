"""Runs the cases by one strategy, as every task of its job.

    python -m tests.cases --strategy=NAME --directory=DIRECTORY [--area=AREA]

The chief prints a line of JSON for each case: what became of it.
"""

import argparse
import json
import os
import time
import traceback

import tensorflow as tf

import tfdist
from tests.cases import STRATEGIES, Job, all_cases, outcome
from tfdist.cluster import servers


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True, choices=STRATEGIES)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--area", help="Default: all.")
    parser.add_argument("--name", help="Of one case. Default: all.")
    args = parser.parse_args()
    if args.strategy == "mirrored":
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * 2,
        )
    cluster = tfdist.Cluster.from_env()
    if args.strategy == "ps" and cluster.role != "chief":
        servers.serve(cluster)
        return
    for i, case in enumerate(all_cases()):
        if args.area not in (None, case.area):
            continue
        if args.name not in (None, case.name):
            continue
        job = Job(args.strategy, os.path.join(args.directory, f"case-{i}"))
        start = time.monotonic()
        line = {"area": case.area, "name": case.name}
        try:
            line["outcome"] = outcome(case, job)
        except Exception:  # Whatever it is, the table shows it.
            line["outcome"] = f"FAILED\n{traceback.format_exc()}"
        line["secs"] = round(time.monotonic() - start, 2)
        if job.is_chief:
            print("CASE " + json.dumps(line), flush=True)
    if args.strategy == "ps":
        servers.release(cluster)


if __name__ == "__main__":
    main()
