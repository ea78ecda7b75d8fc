"""Runs the cases under one strategy, in every task of a job.

    python -m tests.cases --strategy=NAME --directory=DIRECTORY [--area=AREA]

The chief prints a line of JSON with the outcome of each case.
"""

import argparse
import json
import os
import time
import traceback
from unittest import mock

import tensorflow as tf

import tfdist
from tests.cases import STRATEGIES, Job, all_cases, outcome
from tfdist.cluster import servers
from tfdist.cluster.strategies import multi_worker_strategy


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", required=True, choices=STRATEGIES)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--area", help="Default: all.")
    parser.add_argument("--name", help="Of one case. Default: all.")
    parser.add_argument("--every", type=int, default=1, help="So many are one.")
    parser.add_argument("--start", type=int, default=0, help="First of them.")
    parser.add_argument("--backup_workers", type=int, help="With ps.")
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
    if args.strategy == "all-reduce":
        # Before a case, or the module of one, computes anything.
        multi_worker_strategy(cluster)
    for i, case in enumerate(all_cases()[args.start :: args.every]):
        if args.area not in (None, case.area):
            continue
        if args.name not in (None, case.name):
            continue
        directory = os.path.join(args.directory, f"case-{i}")
        job = Job(args.strategy, directory, args.backup_workers)
        start = time.monotonic()
        line = {"area": case.area, "name": case.name}
        try:
            # `fit` sends the servers home at its end; other cases follow.
            with mock.patch.object(servers, "release"):
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
