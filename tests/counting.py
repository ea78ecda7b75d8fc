"""A real session with steps that only count, many per call."""

import numpy as np
import tensorflow as tf

from tfdist.hooks.basic import StopAtStepHook
from tfdist.session.monitored_session import MonitoredTrainingSession, Trainable


class CountingLoop:
    """Counts steps; the loss of a run is that of its last step, `loss(step)`.

    `fail_at`: steps at which the first attempt of a run fails.
    """

    iterator = None

    def __init__(self, global_step, loss, fail_at):
        self.global_step, self.loss, self.fail_at = global_step, loss, fail_at

    @property
    def step(self):
        return int(self.global_step.numpy())

    def run(self, num_steps, watch=lambda: None, ahead=0):
        step = int(self.global_step.assign_add(num_steps))
        if self.fail_at and step >= self.fail_at[0]:
            del self.fail_at[0]
            raise tf.errors.UnavailableError(None, None, "a server is gone")
        return {"loss": self.loss(step)}

    def wait_for_steps(self, watch=lambda: None):
        pass

    def staleness(self):
        return None

    def input_secs(self):
        return np.array([0.25, 1.0])

    def close(self):
        pass

    def has_ended(self):
        return True


def counting_session(
    hooks, *, start=0, w=0.0, fail_at=(), loss=lambda step: 1 / step, **kwargs
):
    """A session that has no hooks but `hooks`, by default without a directory.

    It has a variable `w`.
    """
    failures = list(fail_at)

    def build():
        global_step = tf.Variable(start, dtype=tf.int64)
        loop = CountingLoop(global_step, loss, failures)
        return Trainable(loop, global_step, {"w": tf.Variable(w)})

    kwargs = {
        "save_checkpoint_steps": None,
        "save_summaries_steps": None,
        "log_step_count_steps": None,
        **kwargs,
    }
    return MonitoredTrainingSession(build, hooks=hooks, **kwargs)


def count(hooks, last_step, **kwargs):
    """Runs hooks up to `last_step`; returns the step after each run."""
    stop = StopAtStepHook(last_step=last_step)
    steps = []
    with counting_session([*hooks, stop], **kwargs) as session:
        while not session.should_stop():
            session.run()
            steps.append(session.step)
    return steps
