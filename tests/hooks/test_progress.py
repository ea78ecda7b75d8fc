import io
import time

import pytest
from counting import count

from tfdist.hooks.basic import SessionRunHook
from tfdist.hooks.progress import ProgressHook, progress_line

SPEED = "5.00 steps/s (input 25 %)"


@pytest.mark.parametrize(
    ("args", "line"),
    [
        ((5, None, 2.0, {}), "step 5, 2.00 steps/s"),
        (
            (5, 10, 2.0, {"auc": 0.25}),
            "step  5 of 10 ( 50 %), 2.00 steps/s, auc 0.2500, 0:02 left",
        ),
        (
            (100, 100_000, 400.0, {}),
            "step    100 of 100000 (  0 %),  400 steps/s, 4:10 left",
        ),
        ((10, 10, 3.0, {}, False), "step 10 of 10 (100 %), 3.00 steps/s"),
        (
            (5, None, 2.0, {}, True, "2/2 ps, 3/3 workers"),
            "step 5, 2.00 steps/s, 2/2 ps, 3/3 workers",
        ),
    ],
)
def test_progress_line(args, line):
    assert progress_line(*args) == line


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Speed(SessionRunHook):
    """Makes a session report this many steps per second."""

    def __init__(self, steps_per_sec):
        self.steps_per_sec = steps_per_sec

    def after_create_session(self, session, coord):
        self.secs, self.first = session.secs_in_steps, session.step

    def steps_until_next(self, step):
        return None

    def after_run(self, run_context, run_values):
        session = run_context.session
        steps = session.step - self.first
        session.secs_in_steps = self.secs + steps / self.steps_per_sec


def shown(stream, max_steps=30, last_step=30, start=0, **kwargs):
    hook = ProgressHook(10, stream, max_steps=max_steps, **kwargs)
    count([Speed(5.0), hook], last_step, loss=lambda step: 0.5, start=start)
    return stream.getvalue()


def test_progress_in_a_log():
    assert shown(io.StringIO()).splitlines() == [
        f"step 10 of 30 ( 33 %), {SPEED}, loss 0.5000",
        f"step 20 of 30 ( 66 %), {SPEED}, loss 0.5000, 0:02 left",
        f"step 30 of 30 (100 %), {SPEED}, loss 0.5000",
    ]


def test_a_chief_that_coordinates_tells_its_cpu(monkeypatch):
    monkeypatch.setattr(time, "process_time", lambda: 0.75 * time.monotonic())
    line = shown(io.StringIO(), coordinates=True).splitlines()[1]
    assert "(input 25 %, chief 75 %)" in line


def test_intervals_that_take_no_time_do_not_show():
    """Steps that were already running are counted at once."""

    class Bursts(Speed):
        def after_run(self, run_context, run_values):
            session = run_context.session
            bursts = session.step // 20 + (session.step == 10)
            session.secs_in_steps = self.secs + 0.2 * bursts

    stream = io.StringIO()
    hook = ProgressHook(10, stream)
    count([Bursts(0), hook], 400)
    lines = stream.getvalue().splitlines()
    rates = [float(line.split(",")[1].split()[0]) for line in lines[30:]]
    assert min(rates) > 80
    assert max(rates) < 120


def test_progress_in_a_terminal_is_one_line():
    text = shown(Terminal())
    assert text.count("\n") == 1
    assert text.endswith("loss 0.5000\r\n")
    assert text.count("\x1b[K") == 3


@pytest.mark.parametrize(
    ("max_steps", "last_line"),
    [
        (None, f"step 13, {SPEED}, loss 0.5000"),
        (100, f"step  13 of 100 ( 13 %), {SPEED}, loss 0.5000"),
    ],
)
def test_says_the_last_step_of_a_job_that_ends_early(max_steps, last_line):
    lines = shown(io.StringIO(), max_steps, last_step=13).splitlines()
    assert len(lines) == 2
    assert lines[1] == last_line


def test_says_nothing_when_nothing_was_run():
    assert shown(Terminal(), start=30) == ""


def test_a_recovery_does_not_spoil_the_speed(tmp_path):
    stream = io.StringIO()
    count(
        [Speed(5.0), ProgressHook(10, stream)],
        30,
        fail_at=[28],
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=15,
    )
    lines = stream.getvalue().splitlines()
    assert [line.split(",")[0] for line in lines] == [
        "step 10",
        "step 20",
        "step 20",
        "step 30",
    ]
    assert all(SPEED in line for line in lines)
