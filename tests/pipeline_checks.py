"""Runs pipelines on several devices; tests read its report.

python tests/pipeline_checks.py local REPORT.json    four CPU devices
python -m tfdist.launch --workers=2 tests/pipeline_checks.py cluster ...
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfdist.cluster import probing, servers
from tfdist.cluster.spec import Cluster
from tfdist.pipeline.model_parallel import Pipeline
from tfdist.pipeline.stages import op_devices

HERE = Path(__file__).parent
STEPS = 5


def name(index):
    return f"/job:localhost/replica:0/task:0/device:CPU:{index}"


class OneDevice(keras.Model):
    """Trained by Keras, but for one thing: ids that repeat count once.

    Keras' Adam squares the gradient of each of them apart.
    """

    def train_step(self, data):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x, y, y_pred, sample_weight)
            scaled = self.optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, self.trainable_variables)
        self.optimizer.apply(
            [tf.convert_to_tensor(g) for g in gradients],
            self.trainable_variables,
        )
        self.metrics[0].update_state(loss)
        return self.compute_metrics(x, y, y_pred, sample_weight)


def fitted(
    model,
    *,
    x=None,
    y=None,
    weights=None,
    steps=STEPS,
    optimizer=None,
    loss="mse",
    **arguments,
):
    """The model after some steps on one batch, and its logs."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=[24, 3]).astype("float32") if x is None else x
    y = rng.normal(size=[24, 1]).astype("float32") if y is None else y
    model.compile(optimizer or keras.optimizers.SGD(0.1), loss, **arguments)
    for _ in range(steps):
        logs = model.train_on_batch(
            x, y, sample_weight=weights, return_dict=True
        )
    return model, logs


def difference(a, b):
    """Largest difference of two models' weights."""
    return max(
        float(np.max(np.abs(v.numpy() - w.numpy())))
        for v, w in zip(a.weights, b.weights, strict=True)
    )


# ------------------------------------------------------------- one process


def run_local(report):
    """Runs `local` in a process of its own; returns all that it printed."""
    done = subprocess.run(
        [sys.executable, __file__, "local", str(report)],
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout + done.stderr


def placements(log):
    """`(op, device)` of all that TensorFlow's placer has said."""
    return re.findall(r"(?m)^(\S+): \(\w+\): (/job:\S+)$", log)


def local(report):
    tf.debugging.set_log_device_placement(True)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    found = placed()
    tf.debugging.set_log_device_placement(False)
    found |= schedule() | translations() | job(report.parent)
    found["misplaced"] = misplaced()
    report.write_text(json.dumps(found))


def recurrent():
    keras.utils.set_random_seed(1)
    model = Pipeline(
        keras.Input([6, 8]),
        [
            keras.layers.LSTM(16, return_sequences=True, name="first"),
            [
                keras.layers.LSTM(16, name="second"),
                keras.layers.Dense(1, name="second_dense"),
            ],
        ],
        ["CPU:1", "CPU:2"],
        num_micro_batches=2,
    )
    model.compile("adam", "mse")
    return model


def placed():
    """Where variables are, where ops shall be, and (in the log) where they ran.

    No stage is on the device that TensorFlow takes by itself.
    """
    model = recurrent()
    data = (tf.ones([8, 6, 8]), tf.ones([8, 1]))
    step = tf.function(model.train_step, autograph=False)
    function = step.get_concrete_function(data)
    function(*tf.nest.flatten(data))
    asked = op_devices(function)
    seeds = [v.path for v in model.variables if "seed" in v.path]
    return {
        "num_weights": len(model.trainable_variables),
        "variables": {
            path: device
            for path, device in model.variable_devices().items()
            if path not in seeds
        },
        "ops": list(asked.items()),
        "updates": [
            Counter(
                node.device
                for node in function.graph.as_graph_def().node
                if node.op == "ResourceApplyAdam"
            )
        ],
    }


def schedule():
    keras.utils.set_random_seed(1)
    first, second = (
        keras.Sequential([keras.layers.Dense(1500) for _ in range(2)])
        for _ in range(2)
    )
    model = Pipeline(keras.Input([1500]), [first, second], ["CPU:1", "CPU:2"])
    model.compile("sgd", "mse")
    batch = tf.ones([512, 1500])
    work = model.timeline((batch, batch))
    return {"timeline": [dataclasses.asdict(each) for each in work]}


def translations():
    """The translator on one device and in pipelines; one learns on."""
    from trainer import translator

    sizes = {"vocabulary": 8, "length": 4}
    batches = translator.batches(32, **sizes)

    def trained(devices, optimizer):
        keras.utils.set_random_seed(1)
        if devices:
            model = translator.build(
                2, units=32, **sizes, devices=devices, num_micro_batches=2
            )
        else:
            inputs = outputs = translator.inputs(sizes["length"])
            for stage in translator.stages(2, 32, sizes["vocabulary"]):
                for layer in stage:
                    outputs = layer(outputs)
            model = OneDevice(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"])
        for x, y in batches.take(10):
            model.train_on_batch(x, y)
        return model

    differences = {}
    for case, rows, optimizer in [
        (
            "SGD, 2 x 2 devices",
            [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]],
            lambda: keras.optimizers.SGD(0.1),
        ),
        (
            "Adam, 2 devices",
            ["CPU:1", "CPU:2"],
            lambda: keras.optimizers.Adam(0.01),
        ),
    ]:
        alone, model = trained(None, optimizer()), trained(rows, optimizer())
        differences[case] = difference(alone, model)
    for x, y in batches.take(500):
        model.train_on_batch(x, y)
    source = np.random.default_rng(3).integers(1, 8, [50, 4])
    right = translator.translate(model, source) == source[:, ::-1]
    return {"differences": differences, "translated": float(np.mean(right))}


def job(directory):
    """A job of the Estimator that goes on with other devices; an export."""
    import tfdist

    rows = [["CPU:1", "CPU:2"], ["CPU:3", "CPU:0"]]
    rng = np.random.default_rng(0)
    x = rng.normal(size=[64, 3]).astype("float32")
    y = rng.normal(size=[64, 1]).astype("float32")

    def input_fn():
        return tf.data.Dataset.from_tensors((x, y)).repeat()

    def train(name, devices_of_run):
        for devices, max_steps in zip(devices_of_run, (4, 8), strict=True):

            def model_fn(devices=devices):
                keras.utils.set_random_seed(1)
                layers = [keras.layers.Dense(5), keras.layers.Dense(1)]
                model = Pipeline(
                    keras.Input([3]), layers, devices, num_micro_batches=2
                )
                model.compile(keras.optimizers.Adam(0.01), "mse")
                return model

            config = tfdist.RunConfig(
                model_dir=str(directory / name), steps_per_dispatch=1
            )
            estimator = tfdist.Estimator(model_fn, config)
            estimator.train(input_fn, max_steps=max_steps)
            step = estimator.evaluate(input_fn, steps=1)["global_step"]
            steps.append(step)
        return tf.train.load_checkpoint(estimator.latest_checkpoint())

    steps = []
    moved, stayed = (
        train("moved", [rows[0], rows]),
        train("stayed", [rows[0], rows[0]]),
    )
    keys = [
        key
        for key, dtype in stayed.get_variable_to_dtype_map().items()
        if dtype == tf.float32
    ]
    keras.utils.set_random_seed(1)
    model = Pipeline(
        keras.Input([3]),
        [keras.layers.Dense(5), keras.layers.Dense(1)],
        ["CPU:1", "CPU:2"],
    )
    export = str(directory / "export")
    model.export(export, verbose=False)
    return {
        "steps": steps[:2],
        "resumed_difference": max(
            float(
                np.max(np.abs(moved.get_tensor(key) - stayed.get_tensor(key)))
            )
            for key in keys
        ),
        "export": export,
        "served": {"x": x.tolist(), "y": model.predict(x, verbose=0).tolist()},
    }


def served_elsewhere(export, x):
    """What TensorFlow's loader makes of an export, on a single device."""
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], export)
        signature = loaded.signature_def["serving_default"]
        (source,) = signature.inputs.values()
        (target,) = signature.outputs.values()
        return session.run(target.name, {source.name: x})


def misplaced():
    second = keras.layers.Dense(1)
    second.build([None, 5])
    try:
        Pipeline(
            keras.Input([3]),
            [keras.layers.Dense(5), second],
            ["CPU:1", "CPU:2"],
        )
    except ValueError as error:
        return str(error)
    return ""


# ----------------------------------------------------------------- a cluster


def run_cluster(report):
    """Runs `cluster` as a chief and two workers."""
    log = report.with_suffix(".log")
    with log.open("w") as output:
        code = subprocess.run(
            [
                *[sys.executable, "-m", "tfdist.launch"],
                *["--workers=2", "--max_restarts=0"],
                *[__file__, "cluster", str(report)],
            ],
            env={**os.environ, "PYTHONPATH": str(HERE.parent)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=240,
        ).returncode
    assert code == 0, log.read_text()[-8000:]


def cluster(report):
    task = Cluster.from_env()
    if task.role != "chief":
        servers.serve(task)
        return
    workers = list(task.addresses("worker").values())
    deadline = time.monotonic() + 100
    while any(a.state != probing.TaskState.LIVE for a in probing.ask(workers)):
        assert time.monotonic() < deadline, workers
        time.sleep(0.2)
    tf.config.experimental_connect_to_cluster(
        tf.train.ClusterSpec(task.training_spec()),
        job_name="chief",
        task_index=0,
        protocol="grpc",
    )
    report.write_text(json.dumps(on_workers(report.parent)))
    servers.release(task)


def on_workers(directory):
    def trained(*devices):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(5), keras.layers.Dense(1)]
        model = Pipeline(keras.Input([3]), layers, devices, num_micro_batches=2)
        return fitted(model, optimizer=keras.optimizers.Adam(0.01))[0]

    workers = [f"/job:worker/task:{i}/device:CPU:0" for i in range(2)]
    model, alone = trained(*workers), trained("CPU:0", "CPU:0")
    path = tf.train.Checkpoint(model=model).write(str(directory / "saved"))
    other = trained("CPU:0", workers[0])
    for variable in other.trainable_variables:
        variable.assign(tf.zeros(variable.shape))
    tf.train.Checkpoint(model=other).read(path).expect_partial()
    batch = (tf.ones([8, 3]), tf.ones([8, 1]))
    return {
        "variables": model.variable_devices(),
        "difference": difference(model, alone),
        "timeline": [dataclasses.asdict(w) for w in model.timeline(batch)],
        "restored_difference": difference(model, other),
    }


if __name__ == "__main__":
    {"local": local, "cluster": cluster}[sys.argv[1]](Path(sys.argv[2]))
