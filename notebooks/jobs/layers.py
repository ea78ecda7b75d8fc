"""The slide's deep LSTM, in TF1, one layer a task of a cluster.

Usage: layers.py TASK TASK TASK TASK, as every task of a cluster without ps:
which worker has layer 0, which has layer 1, and so on. The chief prints where
the layers ran, and how many tensors one worker sent to another.
"""

import json
import os
import sys
from collections import Counter

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow.compat.v1 as tf

WORDS, UNITS = 8, 32


def lstm_cell(
    x: tf.Tensor, m: tf.Tensor, c: tf.Tensor, w: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Output and state after one word."""
    i, f, o, g = tf.split(tf.concat([x, m], axis=1) @ w, 4, axis=1)
    c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
    return tf.sigmoid(o) * tf.tanh(c), c


def build(places: list[int]) -> tf.Tensor:
    """The output of the last layer for the last word."""
    m, c, w = [], [], []
    for d, task in enumerate(places):
        with tf.device(f"/job:worker/task:{task}"):
            w.append(tf.get_variable(f"w_{d}", [2 * UNITS, 4 * UNITS]))
            m.append(tf.zeros([16, UNITS]))
            c.append(tf.zeros([16, UNITS]))
    for _ in range(WORDS):
        for d, task in enumerate(places):
            device = f"/job:worker/task:{task}"
            with tf.device(device), tf.name_scope(f"layer_{d}_word"):
                x = tf.random.normal([16, UNITS]) if d == 0 else m[d - 1]
                m[d], c[d] = lstm_cell(x, m[d], c[d], w[d])
    return m[-1]


def main(places: list[int]) -> None:
    """Serves; the chief runs all words once."""
    config = json.loads(os.environ["TF_CONFIG"])
    task = config["task"]
    cluster = tf.train.ClusterSpec(config["cluster"])
    server = tf.train.Server(
        cluster, job_name=task["type"], task_index=int(task["index"])
    )
    if task["type"] != "chief":
        server.join()  # It does not return.
    with tf.Graph().as_default(), tf.Session(server.target) as session:
        output = build(places)
        session.run(tf.global_variables_initializer())
        options = tf.RunOptions(
            trace_level=tf.RunOptions.FULL_TRACE, output_partition_graphs=True
        )
        did = tf.RunMetadata()
        session.run(output, options=options, run_metadata=did)
    ran, sent = Counter(), 0
    for graph in did.partition_graphs:
        for node in graph.node:
            if node.op == "MatMul":
                worker = tf.DeviceSpec.from_string(node.device).task
                ran[f"{node.name[:7]} on worker {worker}"] += 1
            if node.op == "_Recv":
                ends = [
                    node.attr[f"{end}_device"].s for end in ("send", "recv")
                ]
                sent += ends[0] != ends[1] and all(b"worker" in e for e in ends)
    print(json.dumps({"ran": ran, "sent": sent}), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]])
