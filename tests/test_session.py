import pytest
import tensorflow as tf
from small_models import batches, local_loop, logistic

from tfdist.hooks import SessionRunHook
from tfdist.session import TrainingSession


class Recorder(SessionRunHook):
    """Writes down what it is called for; wants to look every `every` steps."""

    def __init__(self, log, name="hook", every=None, stop_at=None):
        self.log, self.name = log, name
        self.every, self.stop_at = every, stop_at

    def after_create_session(self, session):
        self.log.append((self.name, "create", session.step))

    def steps_until_next(self, step):
        return self.every and self.every - step % self.every

    def after_run(self, session, logs):
        self.log.append((self.name, "run", session.step))
        if self.stop_at is not None and session.step >= self.stop_at:
            session.request_stop()

    def end(self, session):
        self.log.append((self.name, "end", session.step))


@pytest.fixture(scope="module")
def parts():
    """One traced loop for all tests; the step is set back before each."""
    dataset = batches().repeat()
    return local_loop(logistic(), dataset, steps_per_dispatch=2)


def session_of(parts, hooks, max_steps=None, start=0):
    loop, global_step = parts
    global_step.assign(start)
    return TrainingSession(
        loop, global_step, hooks, max_steps=max_steps, restored=start > 0
    )


def test_hooks_are_called_in_order(parts):
    log = []
    hooks = [Recorder(log, "a", every=3), Recorder(log, "b")]
    session_of(parts, hooks, max_steps=5).train()
    assert log == [
        ("a", "create", 0),
        ("b", "create", 0),
        ("a", "run", 3),
        ("b", "run", 3),
        ("a", "run", 5),
        ("b", "run", 5),
        ("a", "end", 5),
        ("b", "end", 5),
    ]


@pytest.mark.parametrize("max_steps", [1, 2, 7, 150])
def test_number_of_steps_is_exact(parts, max_steps):
    session = session_of(parts, [], max_steps=max_steps)
    session.train()
    assert session.step == int(parts[1].numpy()) == max_steps
    assert session.secs_in_steps > 0


def test_request_stop(parts):
    log = []
    session = session_of(parts, [Recorder(log, every=2, stop_at=4)])
    session.train()
    assert session.step == 4
    assert log[-1] == ("hook", "end", 4)


def test_a_finished_job_runs_no_step(parts):
    log = []
    session = session_of(parts, [Recorder(log)], max_steps=9, start=9)
    assert session.should_stop()
    session.train()
    assert log == [("hook", "create", 9), ("hook", "end", 9)]


def test_continues_where_it_was(parts):
    log = []
    session_of(parts, [Recorder(log, every=5)], max_steps=12, start=7).train()
    assert [step for _, what, step in log if what == "run"] == [10, 12]


def test_end_is_not_called_after_an_error(parts):
    class Broken(SessionRunHook):
        def after_run(self, session, logs):
            raise RuntimeError("broken")

    log = []
    session = session_of(parts, [Broken(), Recorder(log)], max_steps=5)
    with pytest.raises(RuntimeError, match="broken"):
        session.train()
    assert log == [("hook", "create", 0)]


def test_end_of_input_ends_training():
    log = []
    loop, global_step = local_loop(logistic(), batches(40, 8))
    hooks = [Recorder(log, every=3)]
    session = TrainingSession(
        loop, global_step, hooks, max_steps=100, restored=False
    )
    session.train()
    assert session.step == 5
    assert [step for _, what, step in log if what == "run"] == [3, 5]
    assert log[-1] == ("hook", "end", 5)


def test_empty_input():
    empty = tf.data.Dataset.from_tensor_slices(
        (tf.zeros([0, 4]), tf.zeros([0, 1]))
    ).batch(8)
    loop, global_step = local_loop(logistic(), empty)
    session = TrainingSession(
        loop, global_step, [], max_steps=3, restored=False
    )
    session.train()
    assert session.step == 0
