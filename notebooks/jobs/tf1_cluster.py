"""The lecture's first cluster, in TF1: every task of it runs this program.

A variable lives on the parameter server; the chief reads it from there, and
another one from its own memory, and says how long that takes.
"""

import json
import os
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow.compat.v1 as tf


def least_secs(session: tf.Session, op: tf.Operation, times: int = 15) -> float:
    """How long an op takes when nothing comes in between."""
    secs = []
    for _ in range(times):
        start = time.perf_counter()
        session.run(op)
        secs.append(time.perf_counter() - start)
    return min(secs)


config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
cluster = tf.train.ClusterSpec(config["cluster"])
server = tf.train.Server(
    cluster, job_name=task["type"], task_index=int(task["index"])
)
print(f"{task['type']} {task['index']} serves", flush=True)
if task["type"] != "chief":
    server.join()  # It does not return.

read = {}
with tf.Graph().as_default():
    with tf.device("/job:ps/task:0"):
        weights = tf.get_variable("weights", [784, 100])
    with tf.device("/job:worker/task:0"):
        norm = tf.norm(weights)
    for where in ("chief", "ps"):
        for power in range(8):
            with tf.device(f"/job:{where}/task:0"):
                v = tf.Variable(tf.zeros([10**power]), use_resource=True)
            with tf.device("/job:chief/task:0"):
                # What is not used would not be read.
                read[where, 4 * 10**power] = tf.reduce_max(v).op
    with tf.Session(server.target) as session:
        session.run(tf.global_variables_initializer())
        print("weights:", weights.device, flush=True)
        print("norm:", norm.device, flush=True)
        for (where, size), op in read.items():
            secs = least_secs(session, op)
            row = {"where": where, "bytes": size, "secs": secs}
            print(json.dumps(row), flush=True)
