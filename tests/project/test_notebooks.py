"""The course: its form, and, in the slow tests, every notebook run anew."""

import ast
import importlib
import json
import re
import statistics
import time
import uuid
from pathlib import Path

import pytest
from wrong_answers import WRONG

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "notebooks"
LESSONS = sorted(path.name for path in FOLDER.glob("[0-9]*.ipynb"))
SOLUTIONS = [f"solutions/{name}" for name in LESSONS]
EXERCISES = [
    name
    for name in LESSONS
    if (FOLDER / "exercises" / f"lesson_{name[:2]}.py").exists()
]


BUSY = "This run does not show what the text says"  # To stderr.


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
    """What each code cell shows; of a figure only that it is there.

    Not that this machine was too busy to measure (`course.measured`), which
    nothing stored may say.
    """
    shown = []
    for cell in code(notebook):
        parts = []
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "".join(output.get("text", "")).startswith(BUSY):
                continue
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
    assert 30 <= len(notebook["cells"]) <= 75
    figures = sum(shown.count("a figure") for shown in texts(notebook))
    assert figures >= 2, "a drawing and a measurement"


@pytest.mark.parametrize("name", LESSONS + SOLUTIONS)
def test_cells_are_short_and_stored_as_they_ran(name):
    notebook = read(name)
    _, *cells = code(notebook)  # The first is the setup.
    lines = [len(source(cell).splitlines()) for cell in cells]
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


@pytest.mark.parametrize("name", LESSONS + SOLUTIONS)
def test_code_that_draws_is_folded(name):
    for cell in code(read(name)):
        if re.search(r"^sketch = |^plt\.show\(\)$", source(cell), re.M):
            assert cell["metadata"]["cellView"] == "form"  # Colab's.
            assert cell["metadata"]["jupyter"] == {"source_hidden": True}


@pytest.mark.parametrize("name", LESSONS + SOLUTIONS)
def test_figures_have_an_alternative_text(name):
    for cell in code(read(name)):
        for output in cell["outputs"]:
            if "image/png" in output.get("data", {}):
                assert len(output["metadata"]["image/png"]["alt"]) > 20


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


@pytest.mark.parametrize("name", EXERCISES)
def test_exercises_have_answers_checks_and_wrong_answers(name):
    lesson, solution = read(name), read(f"solutions/{name}")
    answers, checks = tagged(lesson, "answer"), tagged(lesson, "check")
    assert list(answers) == list(checks) == [1, 2, 3, 4, 5]
    assert sorted(WRONG[name[:2]]) == list(checks)
    for number, answer in answers.items():
        assert source(answer) == f"answer_{number} = ..."
    for number, cell in tagged(solution, "check").items():
        assert source(cell) == source(checks[number])
        (text,) = texts({"cells": [cell]})
        assert text == [said(name, number)]
    assert list(tagged(solution, "answer")) == list(checks)


def said(name, number):
    """What the check of a right answer prints."""
    end = f"compare it with the model answer in solutions/{name}."
    lesson = int(name[:2])
    is_open = exercises(name)[number].is_open
    return f"Exercise {lesson}.{number}: {end if is_open else 'right.'}\n"


def exercises(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(FOLDER)
        return importlib.import_module(f"exercises.lesson_{name[:2]}").EXERCISES


@pytest.mark.parametrize("name", EXERCISES)
def test_no_check_shows_an_answer(name):
    """A check cell is one call, and gives what has a name in the notebook."""
    found = tagged(read(name), "check")
    for number, cell in found.items():
        (statement,) = ast.parse(source(cell)).body
        call = statement.value
        assert ast.unparse(call.func) == "course.check"
        values = [ast.unparse(argument) for argument in call.args]
        assert values == [f"'{int(name[:2])}.{number}'", f"answer_{number}"]
        assert all(isinstance(k.value, ast.Name) for k in call.keywords)
    assert sum(e.is_open for e in exercises(name).values()) == 1
    assert all(len(set(e.hints)) == 2 for e in exercises(name).values())


@pytest.mark.parametrize("name", EXERCISES)
def test_no_answer_is_a_literal_of_the_exercises(name):
    path = FOLDER / "exercises" / f"lesson_{name[:2]}.py"
    tree = ast.parse(path.read_text())
    texts = {
        canonical(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Dict)
    }
    for number, cell in tagged(read(f"solutions/{name}"), "answer").items():
        if exercises(name)[number].digest:
            text = canonical(ast.parse(source(cell)).body[-1].value)
            # One digit is in every program.
            assert text not in texts or len(text) < 2, f"exercise {number}"


def canonical(node):
    """The value of an expression without names; the text of another."""
    from notebooks import exercises

    try:
        value = eval(ast.unparse(node), {"__builtins__": {}})
        return exercises.canonical(value)
    except Exception:
        return ast.unparse(node)


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


def test_words_of_the_glossary_are_in_their_lessons():
    text = (FOLDER / "glossary.md").read_text()
    for words, numbers in re.findall(
        r"^\| \*\*(.*?)\*\*.* \| ([\d, ]+) \|$", text, re.MULTILINE
    ):
        word = re.match(r"[^,(]*", words)[0].strip().lower()
        for number in numbers.split(", "):
            (name,) = (x for x in LESSONS if int(x[:2]) == int(number))
            cells = map(source, read(name)["cells"])
            told = re.sub(r"[\W_]+", " ", " ".join(cells).lower())
            assert re.sub(r"\W+", " ", word) in told, f"{words} in {name}"


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


def test_a_notebook_that_is_not_there():
    from notebooks import execute

    with pytest.raises(SystemExit, match="whose name begins with: 8"):
        execute.main(["8"])


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

        checks = tagged(notebook, "check")
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
                    title = f"{int(name[:2])}.{number}"
                    expected[text] = f"Exercise {title}: {verdict}"
                cells.insert(
                    -len(tries), new_code_cell(f"kept = answer_{number}")
                )
                cells.append(new_code_cell(f"answer_{number} = kept"))
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
def test_what_a_busy_machine_disturbs_is_said_and_fails_nothing(run):
    from nbformat.v4 import new_code_cell

    def measure(notebook):
        claims = "1 < 2, 2 < 1", "1 < 2"
        notebook["cells"] = [
            code(notebook)[0],
            *(new_code_cell(f"course.measured({claim})") for claim in claims),
        ]

    notebook = run(LESSONS[0], edit=measure)
    (said,) = notebook["cells"][1]["outputs"]
    assert (said["name"], said["text"][: len(BUSY)]) == ("stderr", BUSY)
    assert notebook["cells"][2]["outputs"] == texts(notebook)[1] == []


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
