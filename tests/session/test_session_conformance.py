"""Compares tfdist's session with TF1's, which TensorFlow 2.21 still has.

Each training is run by both, and what happened must be the same: which hooks
are called in which order, what is raised, which checkpoints and summaries are
written. `DIFFERENCES` lists where tfdist decided otherwise. Not compared is
what exists only with a graph: `Scaffold`, feeds, `graph.pbtxt` and `.meta`
files, and the error for a missing global step.
"""

import threading

import pytest
import tensorflow as tf
from both_sessions import (
    OURS,
    Scripted,
    Training,
    checkpoint_steps,
    ours,
    summaries,
    tf1,
    v1,
)

from tfdist._tf.waiting import wait_for
from tfdist.checkpoint.checkpoints import Checkpoints
from tfdist.session.monitored_session import MonitoredTrainingSession, Trainable

pytestmark = pytest.mark.slow

# --- The order of calls, and errors ------------------------------------------

aborted = tf.errors.AbortedError(None, None, "a")
unavailable = tf.errors.UnavailableError(None, None, "u")


def scripted(*scripts, stop=2):
    """Returns hooks h1, h2, ... with these scripts, and one that stops."""
    return lambda library, log: [
        *(Scripted(f"h{i}", log, s) for i, s in enumerate(scripts, 1)),
        library.StopAtStepHook(last_step=stop),
    ]


def raising_at_2(error):
    return Training(scripted({("after_run", 2): error}, stop=5))


def asking_to_stop(run_context):
    run_context.request_stop()


TRACES = {
    "two hooks, stop at 2": Training(scripted({}, {})),
    "no checkpoint_dir": Training(scripted({})),
    "chief_only_hooks first": Training(
        scripted({}, stop=1),
        chief_only_hooks=lambda _, log: [Scripted("chief", log)],
    ),
    "a stop is seen by all hooks": Training(
        scripted({("after_run", 2): asking_to_stop}, {}, stop=5)
    ),
    "Aborted in after_run of step 3, save_steps=2": Training(
        scripted({("after_run", 3): aborted}, stop=5),
        session={"save_checkpoint_steps": 2},
    ),
    "Unavailable in before_run of step 3, save_steps=2": Training(
        scripted({("before_run", 3): unavailable}, stop=5),
        session={"save_checkpoint_steps": 2},
    ),
    "Aborted in after_run of step 3, no checkpoint since": Training(
        scripted({("after_run", 3): aborted}, stop=5)
    ),
    "Aborted three times": Training(
        scripted({("after_run", n): aborted for n in (1, 2, 4)}, stop=3),
        session={"save_checkpoint_steps": 1},
    ),
    "Aborted in after_create_session": Training(
        scripted({("after_create_session", 1): aborted})
    ),
    "Aborted in begin": Training(scripted({("begin", 1): aborted})),
    "Aborted in end": Training(scripted({("end", 1): aborted}, {})),
    "Cancelled": raising_at_2(tf.errors.CancelledError(None, None, "x")),
    "DeadlineExceeded": raising_at_2(
        tf.errors.DeadlineExceededError(None, None, "x")
    ),
    "Internal": raising_at_2(tf.errors.InternalError(None, None, "x")),
    "FailedPrecondition": raising_at_2(
        tf.errors.FailedPreconditionError(None, None, "x")
    ),
    "InvalidArgument": raising_at_2(
        tf.errors.InvalidArgumentError(None, None, "x")
    ),
    "NotFound": raising_at_2(tf.errors.NotFoundError(None, None, "x")),
    "DataLoss": raising_at_2(tf.errors.DataLossError(None, None, "x")),
    "Unknown": raising_at_2(tf.errors.UnknownError(None, None, "x")),
    "ResourceExhausted": raising_at_2(
        tf.errors.ResourceExhaustedError(None, None, "x")
    ),
    "OutOfRange": raising_at_2(tf.errors.OutOfRangeError(None, None, "x")),
    "StopIteration": raising_at_2(StopIteration()),
    "StopIteration in after_create_session": Training(
        scripted({("after_create_session", 1): StopIteration()})
    ),
    "ValueError": raising_at_2(ValueError("boom")),
}


@pytest.mark.parametrize("name", ["OutOfRange", "StopIteration"])
def test_a_hook_that_ends_training_by_an_error_is_named(name, caplog):
    """It may have meant anything, such as a `next` without a default."""
    ours(TRACES[name], None)
    assert f"A hook raised {name}" in caplog.text
    assert "training ends here" in caplog.text


def test_one_that_does_so_before_training_is_raised(caplog):
    ours(TRACES["StopIteration in after_create_session"], None)
    assert "training ends here" not in caplog.text


@pytest.mark.parametrize("name", TRACES)
def test_calls_errors_and_checkpoints(name, tmp_path):
    directories = tmp_path / "tf1", tmp_path / "ours"
    with_checkpoints = name != "no checkpoint_dir"
    logs = [
        play(TRACES[name], directory if with_checkpoints else None)
        for play, directory in zip((tf1, ours), directories, strict=True)
    ]
    assert logs[1] == logs[0]
    assert "h1.begin" in logs[0]
    steps = [checkpoint_steps(directory) for directory in directories]
    assert steps[1] == steps[0]
    assert bool(steps[0]) == (with_checkpoints and name != "Aborted in begin")


class Thread(v1.train.SessionRunHook):
    """Starts a thread in each session; it may stay until `released`."""

    def __init__(self, log, released=None):
        self._log, self._released = log, released

    def after_create_session(self, session, coord):
        number = len(self._log)
        self._log.append(f"begin {number}")

        def run():
            coord.wait_for_stop()
            self._log.append(f"end {number}")
            if self._released:
                self._released.wait()

        thread = threading.Thread(target=run)
        coord.register_thread(thread)
        thread.start()


@pytest.mark.parametrize("error", [None, ValueError("boom"), aborted], ids=str)
@pytest.mark.parametrize("stays", [False, True])
def test_threads_of_hooks(error, stays):
    """They end with their session, even a failed one, or are left running."""
    logs, before = [], threading.active_count()
    for play in (tf1, ours):
        released = threading.Event() if stays else None

        def hooks(library, log, released=released):
            scripts = scripted({("after_run", 1): error}, stop=2)
            return [Thread(log, released), *scripts(library, log)]

        session = {"stop_grace_period_secs": 0.1 if stays else 120}
        logs.append(play(Training(hooks, session=session)))
        if released:
            released.set()
        wait_for(lambda: threading.active_count() <= before, 10, 0.01)
    assert logs[1] == logs[0]
    ended = [call for call in logs[0] if call.startswith("end ")]
    assert len(ended) == (2 if error is aborted else 1)
    assert threading.active_count() <= before


def test_run_after_a_requested_stop(tmp_path):
    build = counter()
    with MonitoredTrainingSession(build) as session:
        session.request_stop()
        with pytest.raises(RuntimeError, match="should_stop"):
            session.run()
    with pytest.raises(RuntimeError, match="already closed"):
        session.close()
    with tf.Graph().as_default():
        step = v1.train.get_or_create_global_step().assign_add(1)
        session = v1.train.MonitoredTrainingSession(
            hooks=[v1.train.StopAtStepHook(1)]
        )
        session.run(step)
        with pytest.raises(RuntimeError, match="should_stop"):
            session.run(step)
        session.close()
        with pytest.raises(RuntimeError, match="already closed"):
            session.close()


def counter(start=0):
    def build():
        global_step = tf.Variable(start, dtype=tf.int64)
        return Trainable(
            lambda: global_step.assign_add(1) and {}, global_step, {}
        )

    return build


# --- Checkpoints -------------------------------------------------------------

CADENCES = [
    {"save_checkpoint_steps": 1},
    {"save_checkpoint_steps": 2},
    {"save_checkpoint_steps": 3},
    {"save_checkpoint_steps": 5},
    {},
    {"save_checkpoint_secs": None},
    {"save_checkpoint_secs": None, "save_checkpoint_steps": None},
    {"save_checkpoint_secs": 0},
    {"save_checkpoint_steps": 0},
    {"save_checkpoint_secs": 1000},
    {"save_checkpoint_secs": 1, "save_checkpoint_steps": 1},
    {"save_summaries_secs": 1, "save_summaries_steps": 1},
    {"save_summaries_secs": None, "save_summaries_steps": None},
    {"log_step_count_steps": None},
]


@pytest.mark.parametrize("session", CADENCES, ids=str)
def test_what_is_written(session, tmp_path):
    training = Training(scripted(stop=7), session=session)
    logs = tf1(training, tmp_path / "1"), ours(training, tmp_path / "2")
    assert logs[1] == logs[0]
    directories = [tmp_path / name for name in ("1", "2")]
    steps = [checkpoint_steps(directory) for directory in directories]
    assert steps[1] == steps[0]
    files = [list(directory.glob("events.*")) for directory in directories]
    if session.get("save_summaries_steps", 100):
        assert bool(files[1]) == bool(files[0])


@pytest.mark.parametrize("max_to_keep", [5, 1, 0, None])
def test_checkpoints_kept(max_to_keep, tmp_path):
    variable = tf.Variable(1.0)
    (tmp_path / "1").mkdir()
    checkpoints = Checkpoints(str(tmp_path / "2"), {"v": variable}, max_to_keep)
    with tf.Graph().as_default(), v1.Session() as session:
        v = v1.get_variable("v", initializer=1.0)
        saver = v1.train.Saver([v], max_to_keep=max_to_keep)
        session.run(v.initializer)
        for step in range(8):
            path = saver.save(session, str(tmp_path / "1" / "model.ckpt"), step)
    for step in range(8):
        mine = checkpoints.save(step)
    assert mine.rsplit("/", 1)[1] == path.rsplit("/", 1)[1]
    steps = [checkpoint_steps(tmp_path / name) for name in ("1", "2")]
    assert steps[1] == steps[0]


# --- Cadences of the hooks ---------------------------------------------------


@pytest.mark.parametrize("every", [1, 3, 5, 7])
def test_summaries(every, tmp_path):
    training = Training(
        scripted(stop=20),
        session={"save_summaries_steps": every, "log_step_count_steps": every},
    )
    tf1(training, tmp_path / "1")
    ours(training, tmp_path / "2")
    expected = summaries(tmp_path / "1")
    assert summaries(tmp_path / "2") == {
        "start": expected["start"],
        "loss": expected["shown"],
        "global_step/sec": expected["global_step/sec"],
        "input_wait": expected["global_step/sec"],
    }


@pytest.mark.parametrize("start", [0, 10])
@pytest.mark.parametrize(
    "kwargs",
    [
        {"every_n_iter": 1},
        {"every_n_iter": 3},
        {"every_n_iter": 4, "at_end": True},
        {"every_n_secs": 1000},
        {"at_end": True},
    ],
    ids=str,
)
def test_logging(kwargs, start):
    def logging_hook(library, log):
        def formatter(values):
            log.append({k: round(float(v), 4) for k, v in values.items()})
            return ""

        return library.LoggingTensorHook(
            {"a": "loss"}, formatter=formatter, **kwargs
        )

    training = Training(
        lambda library, log: [
            logging_hook(library, log),
            library.StopAtStepHook(num_steps=10),
        ],
        start=start,
    )
    expected, actual = tf1(training), ours(training)
    if kwargs.get("at_end"):
        # TF1 computes the loss once more, for a step after the last.
        assert expected.pop().keys() == actual.pop().keys()
    assert actual == expected
    assert any(isinstance(line, dict) for line in actual) == (
        kwargs != {"at_end": True}
    )


STOPS = {
    "num_steps=5": ({"num_steps": 5}, {}),
    "last_step=5": ({"last_step": 5}, {}),
    "num_steps=5, start=10": ({"num_steps": 5}, {"start": 10}),
    "last_step=5, by=2": ({"last_step": 5}, {"by": 2}),
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_at_step(name):
    stop, kwargs = STOPS[name]
    training = Training(lambda lib, _: [lib.StopAtStepHook(**stop)], **kwargs)
    assert ours(training) == tf1(training) != []


@pytest.mark.parametrize("fail", [True, False])
def test_nan(fail, tmp_path):
    training = Training(
        lambda library, log: [
            library.NanTensorHook(
                "loss:0" if library is v1.train else "loss", fail
            ),
            Scripted("h", log),
            library.StopAtStepHook(last_step=6),
        ],
        nan_at=4,
    )
    log = ours(training, tmp_path / "2")
    assert log == tf1(training, tmp_path / "1")
    assert ("raised NanLossDuringTrainingError" in log) == fail


# --- The arguments of hooks --------------------------------------------------

BAD = [
    ("SecondOrStepTimer", {}),
    ("SecondOrStepTimer", {"every_secs": 1, "every_steps": 1}),
    ("StopAtStepHook", {}),
    ("StopAtStepHook", {"num_steps": 1, "last_step": 1}),
    ("CheckpointSaverHook", {"checkpoint_dir": "d"}),
    (
        "CheckpointSaverHook",
        {"checkpoint_dir": "d", "save_secs": 1, "save_steps": 1},
    ),
    ("StepCounterHook", {"every_n_steps": None}),
    ("StepCounterHook", {"every_n_steps": 1, "every_n_secs": 1}),
    ("LoggingTensorHook", {"tensors": ["loss"]}),
    (
        "LoggingTensorHook",
        {"tensors": ["loss"], "every_n_iter": 1, "every_n_secs": 1},
    ),
    ("LoggingTensorHook", {"tensors": ["loss"], "every_n_iter": 0}),
    ("SummarySaverHook", {}),
    ("ProfilerHook", {"save_steps": 1, "save_secs": 1}),
]


@pytest.mark.parametrize(("name", "kwargs"), BAD, ids=str)
@pytest.mark.parametrize("library", [v1.train, OURS], ids=["tf1", "ours"])
def test_bad_arguments(library, name, kwargs, tmp_path):
    if name in ("ProfilerHook", "SummarySaverHook"):
        kwargs = {**kwargs, "output_dir": str(tmp_path)}
    with tf.Graph().as_default(), pytest.raises(ValueError, match=r"."):
        getattr(library, name)(**kwargs)


# What TF 2.15.1 installed by default, with seconds and steps of each timer; but
# it saved every 600 s
# (the hooks of TF1's session are not public).
DEFAULT_HOOKS = {
    "checkpoint_dir": (
        {},
        [
            ("MyChiefHook", None, None),
            ("StepCounterHook", None, 100),
            ("SummarySaverHook", None, 100),
            ("CheckpointSaverHook", 60, None),
            ("MyHook", None, None),
        ],
    ),
    "none": (
        {"checkpoint_dir": None},
        [("MyChiefHook", None, None), ("MyHook", None, None)],
    ),
    "summary_dir": (
        {"checkpoint_dir": None, "summary_dir": "summaries"},
        [
            ("MyChiefHook", None, None),
            ("StepCounterHook", None, 100),
            ("SummarySaverHook", None, 100),
            ("MyHook", None, None),
        ],
    ),
    "log_step_count_steps": (
        {"log_step_count_steps": None},
        [
            ("MyChiefHook", None, None),
            ("SummarySaverHook", None, 100),
            ("CheckpointSaverHook", 60, None),
            ("MyHook", None, None),
        ],
    ),
    "save_summaries_secs": (
        {"save_summaries_secs": 5},
        [
            ("MyChiefHook", None, None),
            ("StepCounterHook", None, 100),
            ("SummarySaverHook", 5, None),
            ("CheckpointSaverHook", 60, None),
            ("MyHook", None, None),
        ],
    ),
    "save_checkpoint_steps": (
        {"save_checkpoint_steps": 5},
        [
            ("MyChiefHook", None, None),
            ("StepCounterHook", None, 100),
            ("SummarySaverHook", None, 100),
            ("CheckpointSaverHook", None, 5),
            ("MyHook", None, None),
        ],
    ),
    "not the chief": (
        {"is_chief": False, "checkpoint_dir": None},
        [("MyHook", None, None)],
    ),
}


class MyHook(v1.train.SessionRunHook):
    pass


class MyChiefHook(v1.train.SessionRunHook):
    pass


@pytest.mark.parametrize("name", DEFAULT_HOOKS)
def test_default_hooks(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kwargs, expected = DEFAULT_HOOKS[name]
    with MonitoredTrainingSession(
        counter(),
        hooks=[MyHook()],
        chief_only_hooks=[MyChiefHook()],
        **{"checkpoint_dir": str(tmp_path), **kwargs},
    ) as session:
        timers = [getattr(hook, "_timer", None) for hook in session.hooks]
    assert [
        (
            type(hook).__name__,
            getattr(timer, "_every_secs", None),
            getattr(timer, "_every_steps", None),
        )
        for hook, timer in zip(session.hooks, timers, strict=True)
    ] == expected


# --- Where tfdist decided otherwise ------------------------------------------


def a_restored_checkpoint(play, directory):
    """Whether the restored state is saved again immediately."""
    play(Training(scripted(stop=3)), directory)
    before = (directory / "model.ckpt-3.index").stat().st_mtime_ns
    play(Training(scripted(stop=5)), directory)
    return before != (directory / "model.ckpt-3.index").stat().st_mtime_ns


def a_finished_job(play, directory):
    """How many steps a job runs that has already reached its last step."""
    return len(play(Training(scripted(stop=5), start=10), directory))


def a_step_that_counts_three(play, directory):
    """The steps at which hooks are called in a job that should end at 5."""
    stop = lambda lib, _: [lib.StopAtStepHook(last_step=5)]  # noqa: E731
    return play(Training(stop, by=3), directory)


def a_nan_with_a_checkpoint_each_step(play, directory):
    """The checkpoints saved although the loss became NaN at step 4."""
    training = Training(
        lambda library, log: [
            library.NanTensorHook("loss:0" if library is v1.train else "loss")
        ],
        nan_at=4,
        session={"save_checkpoint_steps": 1},
    )
    play(training, directory)
    return [step for step in checkpoint_steps(directory) if step >= 4]


def a_recovery_in_the_event_file(play, directory):
    """The steps that TensorBoard must discard, and the summaries."""
    training = Training(
        scripted({("after_run", 7): aborted}, stop=10),
        session={"save_checkpoint_steps": 4, "save_summaries_steps": 3},
    )
    play(training, directory)
    steps = summaries(directory)
    return steps["start"], steps.get("loss", steps.get("shown"))


DIFFERENCES = [
    (a_restored_checkpoint, True, False),
    (a_finished_job, 1, 0),
    (
        a_step_that_counts_three,
        ["run->3", "run->6", "run->9"],
        ["run->3", "run->6"],
    ),
    (a_nan_with_a_checkpoint_each_step, [4], []),
    (
        a_recovery_in_the_event_file,
        ([1], [1, 4, 7, 10]),
        ([1, 5], [1, 4, 7, 7, 10]),
    ),
]


@pytest.mark.parametrize(
    ("what", "expected_of_tf1", "expected_of_ours"),
    DIFFERENCES,
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_differences(what, expected_of_tf1, expected_of_ours, tmp_path):
    assert what(tf1, tmp_path / "1") == expected_of_tf1
    assert what(ours, tmp_path / "2") == expected_of_ours
