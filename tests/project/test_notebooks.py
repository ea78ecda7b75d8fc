"""The course: its form, and, in the slow tests, every notebook run anew."""

import json
import re
import statistics
import time
import uuid
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
LESSONS = sorted(path.name for path in FOLDER.glob("[0-9]*.ipynb"))
SOLUTIONS = [f"solutions/{name}" for name in LESSONS]

# Answers that look right, by lesson and exercise. The empty one is `...`.
WRONG = {
    "01": {
        1: ['answer_1 = "worker"'],
        2: [
            "answer_2 = json.dumps({'cluster': tasks, 'task': "
            "{'type': 'ps', 'index': 1}})",
            "answer_2 = '{'",
        ],
        3: [
            "answer_3 = lambda gradients, sizes: np.mean(gradients, axis=0)",
            "answer_3 = lambda gradients, sizes: 0.0",
        ],
    },
    "02": {
        1: ["answer_1 = [0, 1, 0, 1]", "answer_1 = 0"],
        2: [
            "answer_2 = [(300,)] + [(100,)] * 6",
            "answer_2 = [(100,)] * 12 + [(600,)]",
        ],
        3: ["answer_3 = 9", "answer_3 = 13"],
    },
    "03": {
        1: ["answer_1 = 1", "answer_1 = 3"],
        2: [
            "answer_2 = 2 * 512 * 3 * (20 * 4 + 8)",
            "answer_2 = 1200 * (20 * 4 + 8)",
        ],
        3: ["answer_3 = 7", "answer_3 = 9"],
    },
    "04": {
        1: ["answer_1 = 16"],
        2: ["answer_2 = 0.4", "answer_2 = 0.25"],
        3: [
            "answer_3 = lambda log: [0 for what, _ in log if what == 'push']",
            "answer_3 = lambda log: [len(log)]",
        ],
    },
    "05": {
        1: ["answer_1 = 2 * 400", "answer_1 = 7 * 400 / 8"],
        2: ["answer_2 = 1 / 0.25", "answer_2 = 1 / 0.09 + 1 / 0.1 + 1 / 0.25"],
        3: [
            "answer_3 = lambda secs, n: secs.max(axis=1).mean()",
            "answer_3 = lambda secs, n: np.sort(secs, axis=1)[:, :n].mean()",
        ],
    },
    "06": {
        1: ["answer_1 = 27", "answer_1 = 35"],
        2: ["answer_2 = 6 * 20 * 5", "answer_2 = 20 * 5"],
        3: [
            "answer_3 = lambda secs, n: [secs[: len(secs) // n], "
            "secs[len(secs) // n :]]",
            "answer_3 = lambda secs, n: [sorted(secs)[i::n] for i in range(n)]",
        ],
    },
    "07": {
        1: ["answer_1 = 10", "answer_1 = 7 + (10 - 6)"],
        2: [
            "answer_2 = 101 * 24 / 1000 * 5",
            "answer_2 = 21 * 24 / 1000 * 10",
        ],
        3: [
            "answer_3 = tfdist.SessionRunHook()",
            "answer_3 = tfdist.StopAtStepHook(last_step=10)",
        ],
    },
    "08": {
        1: ["answer_1 = (1 / 8) ** 8", "answer_1 = 1 / 8"],
        2: ["answer_2 = 256", "answer_2 = 256 * (1 + 2)"],
        3: [
            "answer_3 = lambda read, n: ([], [])",
            "answer_3 = lambda read, n: "
            "(sorted(set(read[0]) & set(read[1])), "
            "sorted(set(range(n)) - set(read[0]) - set(read[1])))",
        ],
    },
    "09": {
        1: ["answer_1 = [40, 50]", "answer_1 = [10, 20, 40]"],
        2: [
            "answer_2 = lambda best_eval_result, current_eval_result: ("
            "current_eval_result['auc'] >= best_eval_result['auc'])",
            "answer_2 = lambda best, current: current['auc'] > best['auc']",
        ],
        3: [
            "answer_3 = lambda saved, takes, throttle_secs: saved",
            "answer_3 = lambda saved, takes, throttle_secs: saved[:: max("
            "1, (takes + throttle_secs) // 10)]",
        ],
    },
    "10": {
        1: ["answer_1 = 8", "answer_1 = 8 * 0.2 / (0.2 + 0.1 / 1.25)"],
        2: ["answer_2 = [200, 100]", "answer_2 = 200"],
        3: [
            'answer_3 = ["mirrored", "ps", "mirrored", "mirrored"]',
            "answer_3 = 4",
        ],
    },
    "11": {
        1: ['answer_1 = "/job:worker/task:1"', "answer_1 = 2"],
        2: [
            "answer_2 = Job(image=image, base_output_dir=bucket, workers=4, "
            "machine=Machine(machine_type='n1-standard-16', "
            "accelerator_type='NVIDIA_TESLA_T4', accelerator_count=2), "
            "spot=True, timeout_secs=21600)",
            "answer_2 = Job(image=image, base_output_dir=bucket, workers=3, "
            "spot=True, timeout_secs=21600)",
        ],
        3: [
            "answer_3 = 'worker_pool_specs: []'",
            "answer_3 = '{'",
        ],
    },
    "12": {
        1: [
            "answer_1 = keras.optimizers.Adam(0.01)",
            "answer_1 = keras.optimizers.Adam(0.001, epsilon=1e-8)",
        ],
        2: [
            "answer_2 = lambda table, n: [table[i::n] for i in range(n)]",
            "answer_2 = lambda table, n: np.array_split(table[::-1], n)",
        ],
        3: [
            "def answer_3():\n"
            "    x = keras.Input([2], name='x')\n"
            "    net = keras.layers.Dense(4, 'tanh')(x)\n"
            "    model = keras.Model({'x': x}, keras.layers.Dense(3)(net))\n"
            "    model.compile(keras.optimizers.SGD(0.1), "
            "'sparse_categorical_crossentropy')\n"
            "    return model",
            "answer_3 = keras.Model",
        ],
    },
    "13": {
        1: [
            "answer_1 = 3.0, [4.0, 8.0]",
            "answer_1 = [2.0, 4.0], 6.0",
        ],
        2: [
            "answer_2 = lambda errors, total: tf.reduce_mean(errors)",
            "answer_2 = lambda errors, total: tf.reduce_sum(errors)",
        ],
        3: [
            "answer_3 = lambda context: tf.data.Dataset.range(64).batch("
            "context.get_per_replica_batch_size(16))",
            "answer_3 = lambda context: tf.data.Dataset.range(64).shard("
            "context.num_input_pipelines, context.input_pipeline_id).batch(16)",
        ],
    },
}


def read(name):
    return json.loads((FOLDER / name).read_text())


def source(cell):
    return "".join(cell["source"])


def code(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def tagged(notebook, kind):
    """Number of an exercise to its cell: `kind` is "answer" or "check"."""
    found = {}
    for cell in code(notebook):
        for tag in cell["metadata"].get("tags", ()):
            if tag.startswith(f"{kind}-"):
                found[int(tag.removeprefix(f"{kind}-"))] = cell
    return found


def texts(notebook):
    """What each code cell shows; of a figure only that it is there."""
    shown = []
    for cell in code(notebook):
        parts = []
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append("a figure")
            else:
                text = output.get("text", data.get("text/plain", output))
                parts.append("".join(text))
        shown.append(parts)
    return shown


# --- Form --------------------------------------------------------------------


@pytest.mark.parametrize("name", LESSONS)
def test_lesson_has_all_parts(name):
    notebook = read(name)
    text = "\n".join(source(cell) for cell in notebook["cells"])
    for part in (
        "**Goals.**",
        "## The idea",
        "compat.v1",
        "## Takeaway",
        "## Exercises",
        "## Links",
    ):
        assert part in text, part
    assert text.count("assert ") >= 5
    assert 30 <= len(notebook["cells"]) <= 60
    figures = sum(shown.count("a figure") for shown in texts(notebook))
    assert figures >= 2, "a drawing and a measurement"


@pytest.mark.parametrize("name", LESSONS + SOLUTIONS)
def test_cells_are_short_and_stored_as_they_ran(name):
    notebook = read(name)
    lines = [len(source(cell).splitlines()) for cell in code(notebook)]
    assert max(lines) <= 25
    assert statistics.median(lines) <= 8
    counts = [cell["execution_count"] for cell in code(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run it from the top"
    assert "writefile" not in json.dumps(notebook)
    for cell in code(notebook):
        for output in cell["outputs"]:
            assert output["output_type"] in ("stream", "display_data"), output
            assert output.get("name") != "stderr", output["text"]
    shown = json.dumps(texts(notebook))
    assert not re.search(r"/(tmp|root|home|opt|work)/", shown)


def lines_of(text):
    return [line.strip() for line in text.splitlines() if line.strip()]


def test_no_cell_restates_the_library():
    def windows(lines):
        return {tuple(lines[i : i + 4]) for i in range(len(lines) - 3)}

    library = set()
    for path in (ROOT / "tfdist").glob("*.py"):
        library |= windows(lines_of(path.read_text()))
    for name in LESSONS + SOLUTIONS:
        for cell in code(read(name)):
            assert not windows(lines_of(source(cell))) & library


@pytest.mark.parametrize("name", LESSONS)
def test_exercises_have_answers_checks_and_wrong_answers(name):
    lesson, solution = read(name), read(f"solutions/{name}")
    answers, checks = tagged(lesson, "answer"), tagged(lesson, "check")
    assert list(answers) == list(checks) == list(range(1, len(checks) + 1))
    assert 3 <= len(checks) <= 4
    assert sorted(WRONG[name[:2]]) == list(checks)
    for number, answer in answers.items():
        assert source(answer) == f"answer_{number} = ..."
    for number, cell in tagged(solution, "check").items():
        assert source(cell) == source(checks[number])
        (text,) = texts({"cells": [cell]})
        assert text == [f"Exercise {number}: right.\n"]
    assert list(tagged(solution, "answer")) == list(checks)


def test_links_lead_somewhere():
    readme = (FOLDER / "README.md").read_text()
    assert all(f"({name})" in readme for name in LESSONS)
    pages = {"README.md": readme} | {
        name: "\n".join(
            source(cell)
            for cell in read(name)["cells"]
            if cell["cell_type"] == "markdown"
        )
        for name in LESSONS
    }
    for name, text in pages.items():
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if "://" not in target:
                assert (FOLDER / target.partition("#")[0]).exists(), name
        for module in re.findall(r"`((?:tfdist|trainer)/\w+\.\w+)`", text):
            assert (ROOT / module).exists(), f"{name}: {module}"


def anchors(name):
    """What JupyterLab calls the headings of a notebook in an address."""
    text = "\n".join(
        source(cell)
        for cell in read(name)["cells"]
        if cell["cell_type"] == "markdown"
    )
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {text.replace("`", "").replace(" ", "-") for text in headings}


def test_the_map_of_concepts_leads_to_sections():
    text = (FOLDER / "README.md").read_text()
    rows = re.findall(
        r"^\| (.*?) \| \[.*?\]\((.*?)#(.*?)\) \|$", text, re.MULTILINE
    )
    assert len(rows) == len(dict((row[0], row) for row in rows)) > 40
    assert {name for _, name, _ in rows} == set(LESSONS)
    for concept, name, anchor in rows:
        assert anchor in anchors(name), concept


def test_the_glossary_is_in_order_and_leads_to_lessons():
    text = (FOLDER / "glossary.md").read_text()
    rows = re.findall(
        r"^\| \*\*(.*?)\*\*.* \| ([\d, ]+) \|$", text, re.MULTILINE
    )
    words = [word.lower() for word, _ in rows]
    assert words == sorted(words)
    assert len(rows) > 40
    numbers = {number for _, found in rows for number in found.split(", ")}
    assert {f"{int(number):02}" for number in numbers} == {
        name[:2] for name in LESSONS
    } - {"11"}


# --- Run ---------------------------------------------------------------------


@pytest.fixture
def run():
    """Executes a notebook in a copy of the folder; nothing may be left."""
    from notebooks import execute

    mark = f"COURSE_RUN={uuid.uuid4().hex}"

    def run(name, **options):
        environ = dict([mark.split("=")])
        return execute.execute(Path(name), environ=environ, **options)

    yield run
    deadline = time.monotonic() + 30
    while left := with_environ(mark.encode()):
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)


def with_environ(text):
    """Command lines of the processes that have `text` in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if text in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes())
        except OSError:  # It ended, or is somebody else's.
            continue
    return found


STALE = "run: python -m notebooks.execute "


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_lesson_shows_what_is_stored(run, name):
    assert texts(run(name)) == texts(read(name)), STALE + name[:2]


@pytest.mark.slow
@pytest.mark.parametrize("name", LESSONS)
def test_solution_is_right_and_nothing_else_is(run, name):
    """Each check runs also after the empty answer and after wrong ones."""
    expected = {}

    def try_answers(notebook):
        from nbformat.v4 import new_code_cell

        answers, checks = tagged(notebook, "answer"), tagged(notebook, "check")
        cells = []
        for cell in notebook["cells"]:
            for number in (n for n, check in checks.items() if check is cell):
                tries = [
                    (f"answer_{number} = ...", "not answered yet."),
                    *((w, "not right yet") for w in WRONG[name[:2]][number]),
                ]
                for answer, verdict in tries:
                    text = f"{answer}\n\n\n{source(cell)}"
                    cells.append(new_code_cell(text))
                    expected[text] = f"Exercise {number}: {verdict}"
                # The last try left the wrong one.
                cells.append(new_code_cell(source(answers[number])))
            cells.append(cell)
        notebook["cells"] = cells

    path = f"solutions/{name}"
    notebook = run(path, edit=try_answers)
    shown = list(zip(code(notebook), texts(notebook), strict=True))
    verdicts = {source(cell): "".join(parts) for cell, parts in shown}
    for text, verdict in expected.items():
        assert verdicts[text].startswith(verdict), text
    stored = {source(cell): cell for cell in code(read(path))}
    for cell, parts in shown:
        if source(cell) in stored:
            assert [parts] == texts({"cells": [stored[source(cell)]]}), STALE


@pytest.mark.slow
def test_cell_that_fails_leaves_nothing(run):
    from nbclient.exceptions import CellExecutionError
    from nbformat.v4 import new_code_cell

    def fail(notebook):
        notebook["cells"] = [
            *code(notebook)[:2],
            new_code_cell(
                'program = [sys.executable, "jobs/tf1_cluster.py"]\n'
                "tasks = testing.LocalCluster(program, ps=1, workers=1)\n"
                'tasks.wait_for_line("ps:0", "ps 0 serves")\n'
                'raise LookupError("between two cells")'
            ),
        ]

    with pytest.raises(CellExecutionError, match="between two cells"):
        run(LESSONS[0], edit=fail)
