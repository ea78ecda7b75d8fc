"""The programs of `examples/`, as their README has them run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

ROOT = Path(__file__).parents[2]
README = (ROOT / "examples" / "README.md").read_text()
COMMANDS = re.findall(r"`python (.*?examples/\w+\.py)`", README)
# Those of which CI runs a like one on a cluster: the same door and strategy.
BY_HAND = ("own_table.py", "images.py")
# Name: flags, what a metric is printed after, and how good it gets at least.
LEARNS = {
    "own_table": ("--steps=500", "AUC ", 0.65),  # Of a coin: 0.5.
    "retrieval": ("--steps=400", "top 10: ", 0.4),  # 0.04.
    "images": ("--epochs=2", "'accuracy': ", 0.7),  # 0.25.
    "text": ("--epochs=3", "'accuracy': ", 0.95),  # 0.5.
}


def own_table(model_dir):
    """Whoever pays less, for what sells, buys."""
    [path] = model_dir.glob("export/serving/*")
    model = tf.saved_model.load(path)
    means = json.loads((model_dir / "known.json").read_text())
    rows = {
        "age": [[means["age"][0]], [np.nan]],
        "price": [[1.0], [1.0]],
        "city": [["c2"], ["c2"]],
        "product": [["p7"], ["p7"]],
    }
    rows = {name: tf.constant(values) for name, values in rows.items()}
    known, missing = model.serve(rows)["output_0"].numpy()
    assert 0 < known < 1
    np.testing.assert_allclose(missing, known, 1e-3)


def retrieval(model_dir):
    """Most of the items are of the user's genre."""
    [path] = model_dir.glob("export/serving/*")
    users = tf.range(200, dtype=tf.int64)
    model = tf.saved_model.load(path)
    items = model.serve({"user": users})["output_0"].numpy()
    assert items.shape == (200, 10)
    assert np.mean(items % 20 == users.numpy()[:, None] % 20) > 0.5


def images(model_dir):
    """It tells a disc from a cross, mostly."""
    x, y = np.abs(np.mgrid[:24, :24] - 11.5)
    disc, cross = np.hypot(x, y) < 7, (np.minimum(x, y) < 1.5) & (x + y < 8)
    noise = np.random.default_rng(0).normal(0, 0.5, [50, 2, 24, 24])
    drawn = (np.stack([disc, cross]) + noise).reshape([100, 24, 24, 1])
    model = keras.models.load_model(model_dir / "model.keras")
    kinds = model.predict(drawn, verbose=0).argmax(1)
    assert np.mean(kinds == np.tile([0, 3], 50)) > 0.75


def text(model_dir):
    """What comes after "but" counts, and "not" turns it."""
    model = tf.saved_model.load(model_dir / "export")
    ends = ["not warm", "not weak", "fresh", "dull"]
    texts = [f"the plot was fresh but the cast was {end}" for end in ends]
    praise = model.serve(tf.constant(texts)).numpy()[:, 0] > 0.5
    np.testing.assert_array_equal(praise, [False, True, True, False])


@pytest.mark.parametrize("name", LEARNS)
def test_both_commands_are_in_the_table(name):
    ends = [c.split()[-1] for c in COMMANDS]
    assert ends.count(f"examples/{name}.py") == 2
    assert len(COMMANDS) == 2 * len(LEARNS)
    lines = (ROOT / "examples" / f"{name}.py").read_text().splitlines()
    assert len(lines) <= 80


def commands():
    for command in COMMANDS:
        by_hand = "launch" in command and command.endswith(BY_HAND)
        marks = [pytest.mark.soak] if by_hand else []
        yield pytest.param(command, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("command", commands())
def test_learns_and_exports(command, tmp_path):
    """Well above chance; what is exported answers."""
    *words, path = command.split()
    name = Path(path).stem
    flags, label, least = LEARNS[name]
    done = subprocess.run(
        [sys.executable, *words, ROOT / path, flags],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout
    reached = re.findall(rf"{label}([\d.]+)", done.stdout)[-1]
    assert float(reached) > least, done.stdout
    globals()[name](tmp_path / "runs" / name)
