"""Serves exports of tfdist in TF 2.15.1 and compares the predictions.

    python -m benchmarks.serving_in_2_15 --data=DIRECTORY --peer=PYTHON

DIRECTORY and PYTHON are those of `benchmarks.canned`. Trains a canned wide and
deep classifier and regressor and a functional Keras model for some steps,
exports them, and calls every signature on examples of `eval.csv`, with the C++
loader (that of TensorFlow Serving) and the Python loader. Prints the largest
difference between the outputs of TF 2.15.1 and of this TensorFlow, and between
its predictions and `Estimator.predict`. The exit code is 1 if a difference is
above 1e-5.

This file runs under either interpreter.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

STEPS, BATCH, ASKED = 100, 128, 200
TOLERANCE = 1e-5

# Plain lists: the two NumPys need not read each other's pickles.
Tensors = dict[str, list]
# Signature to inputs, or (loader, signature) to outputs.
Requests = dict[str, Tensors]
Answers = dict[tuple[str, str], Tensors]


def trained(data: str, directory: str) -> dict[str, Any]:
    """Estimators by name, after some steps on the census data."""
    import keras
    import tensorflow as tf

    import tfdist
    from benchmarks import canned

    def model_fn() -> keras.Model:
        inputs = {name: keras.Input([1], name=name) for name in canned.NUMBERS}
        net = keras.layers.Concatenate()(list(inputs.values()))
        net = keras.layers.BatchNormalization()(net)
        net = keras.layers.Dense(16, "relu")(net)
        net = keras.layers.Dropout(0.1)(net)
        net = keras.layers.Dense(1, "sigmoid")(net)
        model = keras.Model(inputs, net)
        model.compile("adam", loss="binary_crossentropy")
        return model

    def config(name: str) -> tfdist.RunConfig:
        model_dir = os.path.join(directory, name)
        return tfdist.RunConfig(model_dir, tf_random_seed=1)

    linear, deep = canned.feature_columns()
    parts = {
        "linear_feature_columns": linear,
        "dnn_feature_columns": deep,
        "dnn_hidden_units": [64, 32],
    }
    estimators = {
        "classifier": tfdist.DNNLinearCombinedClassifier(
            **parts, config=config("classifier")
        ),
        "regressor": tfdist.DNNLinearCombinedRegressor(
            **parts, config=config("regressor")
        ),
        "keras": tfdist.Estimator(model_fn, config=config("keras")),
    }

    features, labels = canned.read(os.path.join(data, "train.csv"))
    features = {name: v[:, None] for name, v in features.items()}
    labels = labels[:, None].astype("float32")
    for name, estimator in estimators.items():
        names = canned.NUMBERS if name == "keras" else features
        taken = {name: features[name] for name in names}
        dataset = tf.data.Dataset.from_tensor_slices((taken, labels))
        dataset = dataset.repeat().batch(BATCH)
        estimator.train(lambda dataset=dataset: dataset, max_steps=STEPS)
    return estimators


def named(model: Any) -> Any:
    """What is served of the Keras model: its output has a name."""
    import keras

    import tfdist

    model = keras.Model(model.input, {"probability": model.output})
    return tfdist.Serving.of(model, regression="probability")


def requests(features: Mapping[str, Any]) -> Requests:
    """What each signature is asked."""
    import tensorflow as tf

    tensors = {name: values.tolist() for name, values in features.items()}
    examples = []
    for values in zip(*tensors.values(), strict=True):
        example = tf.train.Example()
        for name, [value] in zip(tensors, values, strict=True):
            feature = example.features.feature[name]
            if isinstance(value, str):
                feature.bytes_list.value.append(value.encode())
            else:
                feature.float_list.value.append(value)
        examples.append(example.SerializeToString())
    return {
        "serve": tensors,
        "predict": {"examples": examples},
        "classification": {"inputs": examples},
        "regression": {"inputs": examples},
    }


def answers(path: str, asked: Requests) -> Answers:
    """What the signatures of an export answer, by either loader."""
    import tensorflow as tf

    found = {}
    loaded = tf.saved_model.load(path)
    for name, inputs in asked.items():
        if name in loaded.signatures:
            inputs = {key: tf.constant(value) for key, value in inputs.items()}
            outputs = loaded.signatures[name](**inputs)
            found["Python", name] = {
                key: value.numpy().tolist() for key, value in outputs.items()
            }
    v1 = tf.compat.v1
    with tf.Graph().as_default(), v1.Session() as session:
        signatures = v1.saved_model.load(session, ["serve"], path).signature_def
        for name in asked.keys() & signatures.keys():
            signature = signatures[name]
            outputs = session.run(
                {key: value.name for key, value in signature.outputs.items()},
                {
                    value.name: asked[name][key]
                    for key, value in signature.inputs.items()
                },
            )
            found["C++", name] = {k: v.tolist() for k, v in outputs.items()}
    return found


def difference(one: Tensors, other: Tensors) -> float:
    """The largest difference of two numbers; infinite if strings differ."""
    import numpy as np

    worst = 0.0
    if one.keys() != other.keys():
        return np.inf
    for key in one:
        a, b = np.array(one[key]), np.array(other[key])
        if a.shape != b.shape:
            return np.inf
        if a.dtype.kind == "S":
            worst = max(worst, 0.0 if (a == b).all() else np.inf)
        else:
            distance = np.nan_to_num(np.abs(a - b), nan=np.inf)
            worst = max(worst, float(distance.max()))
    return worst


def ask_in(python: str, directory: str) -> dict[str, Answers]:
    """Answers of all exports, in a process of an interpreter."""
    subprocess.run(
        [python, os.path.abspath(__file__), "--answer", directory],
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=600,
    )
    with open(os.path.join(directory, "answers"), "rb") as file:
        return pickle.load(file)


def answer(directory: str) -> None:
    """Reads `<directory>/requests` and leaves the answers beside it."""
    with open(os.path.join(directory, "requests"), "rb") as file:
        asked = pickle.load(file)
    found = {name: answers(*of_one) for name, of_one in asked.items()}
    with open(os.path.join(directory, "answers"), "wb") as file:
        pickle.dump(found, file)


def compare(data: str, peer: str, directory: str) -> float:
    """Prints a line per signature; returns the largest difference."""
    import tensorflow as tf

    from benchmarks import canned

    features, _ = canned.read(os.path.join(data, "eval.csv"))
    features = {name: v[:ASKED, None] for name, v in features.items()}
    asked, predicted = {}, {}
    for name, estimator in trained(data, directory).items():
        plain = name == "keras"
        path = estimator.export_saved_model(
            os.path.join(directory, "exports"), named if plain else None
        )
        names = canned.NUMBERS if plain else features
        taken = {name: features[name] for name in names}
        asked[name] = path, requests(taken)
        dataset = tf.data.Dataset.from_tensors(taken)
        [batch] = estimator.predict(
            lambda dataset=dataset: dataset, yield_single_examples=False
        )
        batch = {"probability": batch} if plain else batch
        predicted[name] = {key: v.tolist() for key, v in batch.items()}
    with open(os.path.join(directory, "requests"), "wb") as file:
        pickle.dump(asked, file)
    here = ask_in(sys.executable, directory)
    there = ask_in(peer, directory)
    print(f"{'':<34}here      predict")
    worst = 0.0
    for name, by_signature in here.items():
        if by_signature.keys() != there[name].keys():
            raise ValueError(
                f"TF 2.15.1 answers other signatures of {name!r}: "
                f"{sorted(there[name])}, here {sorted(by_signature)}."
            )
        for (loader, signature), outputs in sorted(by_signature.items()):
            outputs_there = there[name][loader, signature]
            differences = [difference(outputs, outputs_there)]
            if signature in ("serve", "predict"):
                differences.append(difference(predicted[name], outputs_there))
            worst = max(worst, *differences)
            print(
                f"{name:<11}{signature:<15}{loader:<8}"
                + "".join(f"{value:<10.1e}" for value in differences)
            )
    return worst


def main() -> None:
    """Compares, or (in a process that this started) answers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data")
    parser.add_argument("--peer")
    parser.add_argument("--answer", help="for the processes that this starts")
    flags = parser.parse_args()
    if flags.answer:
        answer(flags.answer)
        return
    with tempfile.TemporaryDirectory() as directory:
        worst = compare(flags.data, flags.peer, directory)
    print(f"largest difference {worst:.1e}")
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
