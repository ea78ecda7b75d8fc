"""What the notebooks share: checks with hints, and the first cell of each."""

import importlib
import json
import sys
from pathlib import Path

import pytest

from notebooks import prepare

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
NOTEBOOKS = [
    path.relative_to(FOLDER) for path in sorted(FOLDER.glob("**/[0-9]*.ipynb"))
]


# --- Checks ------------------------------------------------------------------


@pytest.fixture
def course(monkeypatch):
    """The module, with a lesson 99 of two exercises."""
    monkeypatch.syspath_prepend(FOLDER)
    course = importlib.import_module("course")
    exercises = importlib.import_module("exercises")
    hints = ("Look there.", "Divide by two.")
    lesson = type(sys)("exercises.lesson_99")
    lesson.EXERCISES = {
        1: exercises.Exercise(hints, digest=exercises.digest_of("99.1", 0.5)),
        2: exercises.Exercise(hints, is_right=lambda f, given: f(2) == given),
        3: exercises.Exercise(hints),
    }
    monkeypatch.setitem(sys.modules, "exercises.lesson_99", lesson)
    course._wrong.clear()
    return course


def checked(course, capsys, *args, **given):
    course.check(*args, **given)
    return capsys.readouterr().out


def test_hints_come_in_order(course, capsys):
    shown = [checked(course, capsys, "99.1", answer) for answer in (1, 2, 3, 4)]
    assert shown[0].splitlines() == [
        "Exercise 99.1: not right yet.",
        "Hint 1: Look there.",
    ]
    assert shown[1].splitlines()[1:] == ["Hint 2: Divide by two."]
    assert shown[2].splitlines()[1:] == [
        "Hint 2: Divide by two.",
        "The solution is in solutions/.",
    ]
    assert shown[3] == shown[2]
    # Each exercise counts for itself, and no answer is no attempt.
    for _ in range(3):
        said = checked(course, capsys, "99.2", ...)
        assert said == "Exercise 99.2: not answered yet.\n"
    assert "Hint 1" in checked(course, capsys, "99.2", lambda x: 3, given=4)


@pytest.mark.parametrize("answer", [0.5, 1 / 2, "1/2", [0.5], None, object()])
def test_a_digest(course, capsys, answer):
    said = checked(course, capsys, "99.1", answer)
    assert ("right." in said) == (answer == 0.5)


def test_a_property_and_what_it_raises(course, capsys):
    assert "right.\n" in checked(course, capsys, "99.2", lambda x: 4, given=4)
    said = checked(course, capsys, "99.2", 4, given=4)
    assert "not right yet (TypeError: 'int' object is not callable)." in said
    assert "not right" in checked(course, capsys, "99.2", lambda x: 4)
    assert checked(course, capsys, "98.1", 1).startswith("Exercise 98.1: There")
    assert checked(course, capsys, "99.7", 1).startswith("Exercise 99.7: There")


def test_an_open_question(course, capsys):
    assert "not right yet" in checked(course, capsys, "99.3", "Yes.")
    said = checked(course, capsys, "99.3", "because " * 30)
    assert "compare it with the model answer" in said


def test_answers_that_mean_the_same(course):
    import numpy as np
    import tensorflow as tf

    exercises = importlib.import_module("exercises")
    same = [
        (1, 1.0, np.int64(1), tf.constant(1), 0.1 * 10),
        ([1, 2], (1, 2), np.array([1, 2]), tf.constant([1.0, 2.0])),
        (2 / 3, 0.667, 0.6667),
        ("Worker  1", " worker 1\n", b"worker 1"),
        ({"b": 1, "a": [2]}, {"a": (2.0,), "b": 1}),
        ({3, 1, 2}, frozenset([2, 1, 3])),
    ]
    digests = [{exercises.digest_of("1.1", x) for x in xs} for xs in same]
    assert [len(found) for found in digests] == [1] * len(same)
    assert len(set.union(*digests)) == len(same)
    assert exercises.digest_of("1.2", 1) not in digests[0]
    assert exercises.digest_of("1.1", 10**17) != exercises.digest_of(
        "1.1", 10**17 + 1
    )


def test_right_answers_that_are_written_otherwise(course, capsys):
    """Than in the solution; wrong ones are in wrong_answers.py."""
    import keras
    import tensorflow as tf

    class Ported(keras.Model):  # It is built when it is called.
        def __init__(self):
            super().__init__()
            self.net = keras.layers.Dense(4, "tanh")
            self.logits = keras.layers.Dense(3)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            self.compile(keras.optimizers.SGD(0.1), loss)

        def call(self, features):
            return self.logits(self.net(features["x"]))

    def slices(context):
        first, step = context.input_pipeline_id, context.num_input_pipelines
        numbers = tf.data.Dataset.range(first, 64, step).shuffle(8)
        return numbers.batch(16 // context.num_replicas_in_sync)

    adam = keras.optimizers.Adam(0.01, 0.9, 0.999, 1e-8, name="another")
    for name, answer in (
        ("11.1", "/job:ps/task:1"),
        ("11.1", "/job:ps/replica:0/task:1/device:CPU:0"),
        ("12.1", adam),
        ("12.3", Ported),
        ("13.3", slices),
    ):
        said = checked(course, capsys, name, answer)
        assert said == f"Exercise {name}: right.\n"


# --- The first cell ----------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=str)
def test_every_notebook_begins_alike(path):
    notebook = json.loads((FOLDER / path).read_text())
    made = prepare.prepared(notebook, path)
    assert made == notebook, "run: python -m notebooks.prepare"
    cells = notebook["cells"]
    assert [cell["cell_type"] for cell in cells[:2]] == ["markdown", "code"]
    assert len(cells[1]["source"]) <= 12
    assert "import course" not in "".join(
        "".join(cell["source"]) for cell in cells[1:]
    )


def test_the_badge_leads_into_the_repository():
    url = prepare.repository()
    assert url.startswith("https://github.com/")
    badge = prepare.badge(Path("04_replication.ipynb"))
    owner = url.removeprefix("https://github.com/")
    assert f"/github/{owner}/blob/main/notebooks/04_replication.ipynb" in badge


def test_a_runtime_with_another_version_must_restart(monkeypatch):
    import keras

    assert prepare.outdated() == []
    monkeypatch.setattr(keras, "__version__", "3.4.1")
    assert prepare.outdated() == ["keras 3.4.1"]
    with pytest.raises(RuntimeError, match=r"keras 3.4.1.*Restart it"):
        prepare.course()
