"""Checks how a server serves an export; shared by several test files."""

import pickle
import subprocess
import sys

import tensorflow as tf

# The loader in C++, in a process without Keras and tfdist.
_SERVE = """
import pickle, sys
sys.modules["keras"] = sys.modules["tfdist"] = None  # An import fails.
import tensorflow.compat.v1 as tf
path, calls = pickle.load(sys.stdin.buffer)
results = []
with tf.Graph().as_default(), tf.Session() as session:
    signatures = tf.saved_model.load(session, ["serve"], path).signature_def
    for name, values in calls:
        signature = signatures[name]
        inputs = signature.inputs
        feed = {inputs[k].name: values[k] for k in inputs}
        fetch = {k: out.name for k, out in signature.outputs.items()}
        results.append((signature.method_name, session.run(fetch, feed)))
sys.stdout.buffer.write(pickle.dumps(results))
"""


def serve(path, *calls):
    """`(method name, outputs)` of each `(signature, inputs)`."""
    result = subprocess.run(
        [sys.executable, "-c", _SERVE],
        input=pickle.dumps((str(path), calls)),
        stdout=subprocess.PIPE,
        timeout=120,
        check=True,
    )
    return pickle.loads(result.stdout)


def example(**features):
    """A serialized `tf.Example` of lists of numbers or strings."""

    def feature(values):
        if isinstance(values[0], str):
            return tf.train.Feature(
                bytes_list=tf.train.BytesList(
                    value=[value.encode() for value in values]
                )
            )
        if isinstance(values[0], int):
            return tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))

    return tf.train.Example(
        features=tf.train.Features(
            feature={name: feature(v) for name, v in features.items()}
        )
    ).SerializeToString()
