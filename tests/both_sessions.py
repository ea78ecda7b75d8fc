"""The same training under TF1's MonitoredTrainingSession and under tfdist's."""

import collections
import dataclasses
import types
from collections.abc import Callable

import tensorflow as tf

from tfdist.hooks import basic, saving_hooks, session_run_hook, summary_hooks
from tfdist.session.monitored_session import MonitoredTrainingSession, Trainable

v1 = tf.compat.v1
OURS = types.SimpleNamespace(
    **vars(basic)
    | vars(saving_hooks)
    | vars(session_run_hook)
    | vars(summary_hooks)
)


@dataclasses.dataclass(frozen=True)
class Training:
    """Counts from `start`, by `by` each step; the loss is 1 / (the new step).

    `hooks` creates the hooks from two arguments: the library that has them
    (`tf.compat.v1.train` or `OURS`) and a log that they may write to.
    `nan_at`: the step at which the loss is NaN.
    """

    hooks: Callable = lambda library, log: []
    chief_only_hooks: Callable = lambda library, log: []
    start: int = 0
    by: int = 1
    nan_at: int = -1
    session: dict = dataclasses.field(default_factory=dict)


def tf1(training, directory=None):
    """Runs it under `tf.compat.v1`; returns the log of what happened."""
    log = []
    with tf.Graph().as_default():
        global_step = v1.get_variable(
            "global_step",
            initializer=tf.constant(training.start, tf.int64),
            trainable=False,
            use_resource=True,
            collections=[
                v1.GraphKeys.GLOBAL_VARIABLES,
                v1.GraphKeys.GLOBAL_STEP,
            ],
        )
        # TF1's hooks read the step while it is incremented, before or after:
        # what they then do is left to chance. Here they read it before.
        v1.train.StopAtStepHook(1).begin()
        (read,) = v1.get_collection("global_step_read_op_cache")
        with tf.control_dependencies([read]):
            step = tf.identity(global_step.assign_add(training.by))
        loss = tf.where(
            tf.equal(step, training.nan_at),
            float("nan"),
            1 / tf.cast(step, tf.float32),
        )
        tf.identity(loss, name="loss")
        v1.summary.scalar("shown", loss)
        _play(
            lambda **kwargs: v1.train.MonitoredTrainingSession(**kwargs),
            lambda session: session.run(step),
            training,
            v1.train,
            directory,
            log,
        )
    return log


def ours(training, directory=None):
    """Runs it under tfdist; returns the log of what happened."""
    log = []

    def build():
        global_step = tf.Variable(training.start, dtype=tf.int64)

        def step():
            now = int(global_step.assign_add(training.by))
            return {"loss": float("nan") if now == training.nan_at else 1 / now}

        return Trainable(step, global_step, {})

    def run(session):
        session.run()
        return session.step

    _play(
        lambda **kwargs: MonitoredTrainingSession(build, **kwargs),
        run,
        training,
        OURS,
        directory,
        log,
    )
    return log


def _play(make_session, run, training, library, directory, log):
    hooks = training.hooks(library, log)
    chief_only_hooks = training.chief_only_hooks(library, log)
    try:
        session = make_session(
            hooks=hooks,
            chief_only_hooks=chief_only_hooks,
            checkpoint_dir=directory and str(directory),
            **training.session,
        )
        with session:
            while not session.should_stop():
                log.append(f"run->{run(session)}")
    except Exception as error:
        log.append(f"raised {type(error).__name__}")


class Scripted(v1.train.SessionRunHook):
    """Writes down its calls, and does as it is told at some of them.

    `script` is from the method and the number of its call to an exception,
    which is raised, or to a function of the call's last argument.
    """

    def __init__(self, name, log, script=None):
        self.name, self.log, self.script = name, log, script or {}
        self.calls = collections.Counter()

    def _called(self, method, *args):
        self.calls[method] += 1
        self.log.append(f"{self.name}.{method}")
        action = self.script.get((method, self.calls[method]))
        if isinstance(action, Exception):
            raise action
        if action:
            action(*args)

    def begin(self):
        self._called("begin")

    def after_create_session(self, session, coord):
        self._called("after_create_session")

    def before_run(self, run_context):
        self._called("before_run", run_context)

    def after_run(self, run_context, run_values):
        self._called("after_run", run_context)

    def end(self, session):
        self._called("end")


def checkpoint_steps(directory):
    """The steps of the checkpoints in a directory."""
    return sorted(
        int(path.stem.split("-")[1]) for path in directory.glob("*.index")
    )


def summaries(directory):
    """Tag -> steps of the scalars, and `start` -> steps, in a directory."""
    steps = collections.defaultdict(list)
    for path in directory.glob("events.*"):
        for record in tf.data.TFRecordDataset(str(path)):
            event = v1.Event.FromString(record.numpy())
            if event.session_log.status == v1.SessionLog.START:
                steps["start"].append(event.step)
            for value in event.summary.value:
                steps[value.tag].append(event.step)
    return dict(steps)
