import functools
import os
import resource
import signal
import sys
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from both_sessions import Training, tf1
from counting import CountingLoop, count
from small_models import batches, local_loop, logistic

from tfdist._tf.waiting import wait_for
from tfdist.checkpoint import checkpoints
from tfdist.cluster.health import ServerFailure, ServerLostError
from tfdist.cluster.spec import Cluster
from tfdist.hooks.basic import LoggingTensorHook, StopAtStepHook
from tfdist.hooks.saving_hooks import CheckpointSaverHook
from tfdist.hooks.session_run_hook import SessionRunArgs, SessionRunHook
from tfdist.launch.testing import LocalCluster
from tfdist.session import recoverable, recovery
from tfdist.session.monitored_session import MonitoredTrainingSession, Trainable

FROZEN = ServerFailure.FROZEN
CANCELLED = tf.errors.CancelledError(None, None, "Graph execution error:\nGone")


class Recorder(SessionRunHook):
    """Records its calls; `every` is its cadence in steps."""

    def __init__(self, log, name="hook", every=None, stop_at=None):
        self.log, self.name = log, name
        self.every, self.stop_at = every, stop_at

    def begin(self):
        self.log.append((self.name, "begin", None))

    def after_create_session(self, session, coord):
        self.log.append((self.name, "create", session.step))

    def steps_until_next(self, step):
        return self.every and self.every - step % self.every

    def after_run(self, run_context, run_values):
        session = run_context.session
        self.log.append((self.name, "run", session.step))
        if self.stop_at is not None and session.step >= self.stop_at:
            run_context.request_stop()

    def end(self, session):
        self.log.append((self.name, "end", session.step))


class Raiser(SessionRunHook):
    """Raises `error` in `method`, `times` times, at `step`."""

    def __init__(self, method, error, step=None, times=1):
        self._error, self._step, self._times = error, step, times
        setattr(self, method, self._raise)

    def steps_until_next(self, step):
        return None

    def _raise(self, *args):
        step = getattr(getattr(args[0], "session", None), "step", None)
        at = self._step is None or step == self._step
        if args and at and self._times:
            self._times -= 1
            raise self._error


def make(dataset=None, hidden=list, **kwargs):
    """Returns a `build_fn`; its `made` lists what it has built."""

    def build():
        model = logistic(hidden=hidden(), **kwargs)
        data = batches().repeat() if dataset is None else dataset
        loop, global_step = local_loop(model, data, steps_per_dispatch=2)
        named = checkpoints.named_variables(model)
        made = Trainable(loop, global_step, named, model=model)
        build.made.append(made)
        return made

    build.made = []
    return build


def counted():
    """Returns a `build_fn` whose steps only count: nothing is traced."""

    def build():
        global_step = tf.Variable(0, dtype=tf.int64)
        loop = CountingLoop(global_step, lambda step: 1 / step, [])
        made = Trainable(loop, global_step, {"w": tf.Variable(0.0)})
        build.made.append(made)
        return made

    build.made = []
    return build


def more():
    return [keras.layers.Dense(2, name="more")]


def train(build, max_steps=5, hooks=(), **kwargs):
    """Runs a whole session and returns it."""
    hooks = [*hooks, StopAtStepHook(last_step=max_steps)]
    with MonitoredTrainingSession(build, hooks=hooks, **kwargs) as session:
        while not session.should_stop():
            session.run()
    return session


def values(trainable):
    return {n: v.numpy() for n, v in trainable.variables.items()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_array_equal(value, theirs[name], err_msg=name)


# --- Steps and hooks ---------------------------------------------------------


def test_hooks_are_called_in_order():
    log = []
    train(counted(), 5, [Recorder(log, "a", every=3), Recorder(log, "b")])
    assert log == [
        *[("a", "begin", None), ("b", "begin", None)],
        *[("a", "create", 0), ("b", "create", 0)],
        *[("a", "run", 3), ("b", "run", 3)],
        *[("a", "run", 5), ("b", "run", 5)],
        *[("a", "end", 5), ("b", "end", 5)],
    ]


@pytest.mark.parametrize(
    "max_steps", [1, pytest.param(7, marks=pytest.mark.slow), 150]
)
def test_number_of_steps_is_exact(max_steps):
    build = make()
    session = train(build, max_steps)
    assert session.step == build.made[0].global_step.numpy() == max_steps
    assert session.secs_in_steps > 0


def test_a_hook_that_wants_no_step_is_named():
    """Otherwise the session would run no step, forever."""

    class Eager(SessionRunHook):
        def steps_until_next(self, step):
            return 3 - step

    message = "Eager.steps_until_next must return None or at least 1.*: 0 at"
    with pytest.raises(ValueError, match=message):
        train(counted(), 5, [Eager()])


class Steps(tf.compat.v1.train.SessionRunHook):
    """A TF1 hook that records losses, without `steps_until_next`."""

    def __init__(self, library):
        self.library, self.losses = library, []

    def before_run(self, run_context):
        loss = "loss:0" if self.library is tf.compat.v1.train else "loss"
        return tf.compat.v1.train.SessionRunArgs(loss)

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results))


class OurSteps(SessionRunHook):
    """The same, as a tfdist hook."""

    def __init__(self, library):
        self.losses = []

    def after_run(self, run_context, run_values):
        self.losses.append(float(run_values.results["loss"]))


@pytest.mark.parametrize("kind", [Steps, OurSteps])
def test_a_hook_that_says_nothing_sees_every_step(kind, caplog):
    """As in TF1, whose session runs for comparison."""
    theirs = Steps(tf.compat.v1.train)
    tf1(
        Training(
            lambda library, _: [theirs, library.StopAtStepHook(last_step=9)]
        )
    )
    hook = kind(None)
    with caplog.at_level("WARNING"):
        count([hook], 9)
    np.testing.assert_allclose(hook.losses, theirs.losses)
    assert len(hook.losses) == 9
    assert caplog.text.count(f"{kind.__name__} is called after every step") == 1


def test_a_hook_that_says_any_number_is_called_less(caplog):
    log = []
    assert count([Recorder(log)], 9) == [9]
    assert "after every step" not in caplog.text


def test_request_stop():
    log = []
    train(counted(), 100, [Recorder(log, every=2, stop_at=4)])
    assert log[-2:] == [("hook", "run", 4), ("hook", "end", 4)]


def test_a_finished_job_runs_no_step(tmp_path):
    log = []
    train(counted(), 5, checkpoint_dir=str(tmp_path))
    train(counted(), 5, [Recorder(log)], checkpoint_dir=str(tmp_path))
    assert [what for _, what, _ in log] == ["begin", "create", "end"]


def test_end_of_input_ends_training():
    log = []
    build = make(batches(40, 8))
    assert train(build, 100, [Recorder(log, every=3)]).step == 5
    assert [step for _, what, step in log if what == "run"] == [3, 5]
    assert log[-1] == ("hook", "end", 5)


def test_empty_input():
    assert train(make(batches(8).take(0)), 3).step == 0


def test_a_step_function_runs_once_a_run():
    def build():
        global_step = tf.Variable(0, dtype=tf.int64)
        weight = tf.Variable(2.0)

        @tf.function
        def step():
            global_step.assign_add(1)
            weight.assign_sub(0.5)
            return {"loss": weight}

        return Trainable(step, global_step, {"weight": weight})

    seen = []

    class Fetching(SessionRunHook):
        def before_run(self, run_context):
            return SessionRunArgs({"a": "weight", "b": ["loss"]})

        def after_run(self, run_context, run_values):
            seen.append(run_values.results)

    hooks = [Fetching(), StopAtStepHook(num_steps=2)]
    with MonitoredTrainingSession(build, hooks=hooks) as session:
        assert session.run() == {"loss": 1.5}
        assert session.run() == {"loss": 1.0}
        assert session.should_stop()
        with pytest.raises(RuntimeError, match="after the session had stopped"):
            session.run()
    assert seen == [{"a": 1.5, "b": [1.5]}, {"a": 1.0, "b": [1.0]}]
    with pytest.raises(RuntimeError, match="already closed"):
        session.close()


def test_another_variable_called_global_step_is_refused():
    step, other = (tf.Variable(0, dtype=tf.int64) for _ in range(2))
    Trainable(dict, step, {"global_step": step})
    with pytest.raises(ValueError, match="'global_step' that is not the"):
        Trainable(dict, step, {"global_step": other})


FUNCTION_ON_A_CLUSTER = """
import tensorflow as tf
import tfdist

cluster = tfdist.Cluster.from_env()


def build():
    step = tf.Variable(0, dtype=tf.int64)
    return tfdist.Trainable(lambda: step.assign_add(1) and {}, step, {})


if cluster.role != "chief":
    tfdist.cluster.serve(cluster)
else:
    hooks = [tfdist.StopAtStepHook(last_step=2)]
    with tfdist.MonitoredTrainingSession(
        build, hooks=hooks, cluster=cluster
    ) as session:
        while not session.should_stop():
            session.run()
    print("at step", session.step, flush=True)
    tfdist.cluster.release(cluster)
"""


@pytest.mark.slow
def test_a_step_function_on_parameter_servers_runs_on_the_chief(tmp_path):
    (tmp_path / "job.py").write_text(FUNCTION_ON_A_CLUSTER)
    job = [sys.executable, "job.py"]
    with LocalCluster(job, ps=1, workers=1, cwd=tmp_path) as tasks:
        assert tasks.wait(timeout_secs=120) == 0
        output = tasks.output("chief:0")
        assert wait_for(lambda: all(tasks.exit_codes().values()), 60)
        assert set(map(tuple, tasks.exit_codes().values())) == {(0,)}
    assert "at step 2" in output
    assert "workers do not train" in output


JOBS = """
import time
import keras
import numpy as np
import tensorflow as tf
import tfdist


class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        time.sleep(1)


def model_fn():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


for job in ("first", "second", "third"):
    x = np.ones([8, 3], "float32")
    _, history = tfdist.fit(
        model_fn,
        (x, x[:, :1]),
        epochs=8,
        callbacks=[Slow()],
        model_dir=job,
    )
    print(job, history and len(history.epoch), flush=True)
if history:
    estimator = tfdist.Estimator(model_fn, tfdist.RunConfig("third"))
    dataset = tf.data.Dataset.from_tensors(x)
    print("predicted", len([*estimator.predict(lambda: dataset)]), flush=True)
"""


@pytest.mark.slow
def test_the_jobs_of_one_program(tmp_path):
    """Servers serve job after job, even a restarted one."""
    (tmp_path / "job.py").write_text(JOBS)
    job = [sys.executable, "job.py"]
    cluster = LocalCluster(job, ps=1, workers=1, cwd=tmp_path, restart_secs=1.0)
    with cluster as tasks:
        printed = functools.partial(tasks.output, "chief:0")
        assert wait_for(lambda: "first 8" in printed(), 120)
        begun = (tmp_path / "second" / "checkpoint").exists
        assert wait_for(begun, 60)
        tasks.kill("worker:0")
        assert tasks.wait(timeout_secs=200) == 0, printed()
        killed = [-signal.SIGKILL, 0]
        codes = {"chief:0": [0], "worker:0": killed, "ps:0": [0]}
        assert wait_for(lambda: tasks.exit_codes() == codes, 60), codes
        assert "third None" in tasks.output("ps:0")
        assert "third 8" in printed()
        assert "predicted 8" in printed()


def test_a_hook_asks_for_what_is_not_there():
    class Asking(SessionRunHook):
        def before_run(self, run_context):
            return SessionRunArgs("nothing")

    with pytest.raises(ValueError, match="variable is called 'nothing'"):
        train(counted(), hooks=[Asking()])


@pytest.mark.parametrize("fetches", [None, [], {}])
def test_a_hook_asks_for_nothing(fetches):
    seen = []

    class Asking(SessionRunHook):
        def before_run(self, run_context):
            return SessionRunArgs(fetches)

        def after_run(self, run_context, run_values):
            seen.append(run_values.results)

    train(counted(), 1, [Asking()])
    assert seen == [fetches]


def test_a_hook_asks_for_a_tensor_which_no_step_changes():
    hook = LoggingTensorHook({"loss": tf.constant(1.0)}, every_n_iter=1)
    with pytest.raises(TypeError, match=r"name or a variable.*\['loss'\]"):
        train(counted(), 1, [hook])


def test_the_global_step_of_tensorflow_is_that_of_the_session():
    """TF1's hooks fetch it; nothing would count it."""
    theirs, seen = tf.compat.v1.train.get_or_create_global_step(), []

    class Asking(SessionRunHook):
        def before_run(self, run_context):
            return SessionRunArgs([theirs])

        def after_run(self, run_context, run_values):
            seen.extend(run_values.results)

    train(counted(), 3, [Asking()])
    assert seen == [1, 2, 3]


def test_a_hook_of_a_graph():
    """It is refused before training, rather than failing at the end."""
    theirs = tf.compat.v1.train.FinalOpsHook("loss")
    wanted = r"own FinalOpsHook needs a graph.*Use tfdist's FinalOpsHook"
    with pytest.raises(TypeError, match=wanted):
        train(counted(), 1, [theirs])


def test_a_hook_feeds():
    hook = tf.compat.v1.train.FeedFnHook(lambda: {"x": 1.0})
    with pytest.raises(
        ValueError, match=r"FeedFnHook feeds \['x'\], but there"
    ):
        train(counted(), 1, [hook])


def test_evaluates_in_this_process():
    build = make(metrics=["mse"])
    with MonitoredTrainingSession(
        build, hooks=[Recorder([], every=3)]
    ) as session:
        session.run()
        metrics = session.evaluate(batches(60, 8, seed=1))
        expected = session.model.evaluate(
            batches(60, 8, seed=1), verbose=0, return_dict=True
        )
        assert metrics == pytest.approx(expected, rel=1e-5)
        assert session.evaluate(batches().take(0)) == {}
        assert session.run()["loss"] > 0


def test_a_step_function_has_nothing_to_evaluate():
    global_step = tf.Variable(0, dtype=tf.int64)
    with (
        MonitoredTrainingSession(
            lambda: Trainable(dict, global_step, {})
        ) as session,
        pytest.raises(ValueError, match="plain step function"),
    ):
        session.evaluate(batches())


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0], r"dictionary of logs. Received: \[1.0\]"),
        ({"loss": "low"}, "Log 'loss' .* Received: 'low'"),
        ({"loss": np.ones([2])}, "Log 'loss' .* must be a number"),
    ],
)
def test_what_a_step_function_returns(returned, message):
    trainable = Trainable(lambda: returned, tf.Variable(0, dtype=tf.int64), {})
    with (
        MonitoredTrainingSession(lambda: trainable) as session,
        pytest.raises(TypeError, match=message),
    ):
        session.run()


# --- Errors ------------------------------------------------------------------


@pytest.mark.parametrize(
    "method",
    ["begin", "after_create_session", "before_run", "after_run", "end"],
)
def test_a_hook_that_raises(method, tmp_path):
    log = []
    hooks = [Recorder(log), Raiser(method, ValueError("mine"))]
    if method == "begin":
        hooks[1].begin = lambda: hooks[1]._raise(None)
    with pytest.raises(ValueError, match="mine"):
        train(counted(), 5, hooks, checkpoint_dir=str(tmp_path))
    ended = [what for _, what, _ in log].count("end")
    assert ended == (method == "end")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    # The earlier checkpoint is complete, and the next job resumes from it.
    if method not in ("begin", "after_create_session"):
        assert train(counted(), 5, checkpoint_dir=str(tmp_path)).step == 5


@pytest.mark.parametrize(
    "both",
    [
        {"save_checkpoint_secs": 1, "save_checkpoint_steps": 1},
        {"save_summaries_secs": 1, "save_summaries_steps": 1},
    ],
)
def test_two_cadences(both, tmp_path):
    with pytest.raises(ValueError, match="Exactly one of"):
        MonitoredTrainingSession(
            counted(), checkpoint_dir=str(tmp_path), **both
        )


def test_no_trainable():
    with pytest.raises(TypeError, match=r"must return a tfdist\.Trainable"):
        MonitoredTrainingSession(lambda: 3)


@pytest.mark.parametrize("argument", ["cluster", "strategy"])
def test_arguments_of_another_type(argument):
    with pytest.raises(TypeError, match=f"`{argument}` must be a "):
        MonitoredTrainingSession(Trainable, **{argument: "mirrored"})


@pytest.mark.parametrize("role", ["worker", "ps", "evaluator"])
def test_only_the_chief_has_a_session(role):
    """Refused at once: a task waiting for its cluster would await itself."""
    roles = ("chief", "worker", "ps", "evaluator")
    jobs = {other: [f"{other}:1"] for other in roles}
    cluster = Cluster.from_jobs(jobs, role, 0)
    with pytest.raises(ValueError, match=r"Only the chief .* Call `train_and"):
        MonitoredTrainingSession(Trainable, cluster=cluster)


# --- Recovery in one process -------------------------------------------------

AGAIN = tf.errors.AbortedError(None, None, "lost")


def test_after_a_failure_everything_is_made_anew(tmp_path):
    log, build = [], counted()
    hooks = [Recorder(log, every=2), Raiser("after_run", AGAIN, step=4)]
    session = train(
        build, 6, hooks, checkpoint_dir=str(tmp_path), save_checkpoint_steps=3
    )
    assert len(build.made) == 2
    assert session.step == build.made[1].global_step.numpy() == 6
    assert session.restored_from.endswith("model.ckpt-3")
    steps = [(what, step) for _, what, step in log]
    assert steps.count(("begin", None)) == steps.count(("end", 6)) == 1
    assert steps.index(("create", 3)) > steps.index(("run", 4))


def test_layers_without_a_name_have_the_same_one_again(tmp_path):
    def build():
        model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
        global_step = tf.Variable(0, dtype=tf.int64)

        def step():
            weights = model.trainable_variables
            optimizer.apply([tf.ones_like(w) for w in weights], weights)
            return {"at": global_step.assign_add(1)}

        variables = {v.path: v for v in (*model.weights, *optimizer.variables)}
        return Trainable(step, global_step, variables)

    kept = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 3}
    hook = Raiser("after_run", AGAIN, step=4)
    session = train(build, 6, [hook], **kept)
    assert session.restored_from.endswith("model.ckpt-3")
    session = train(build, 8, **kept)  # Another one in this process.
    assert session.restored_from.endswith("model.ckpt-6")
    assert "sequential/dense/kernel" in session.variables


def test_without_checkpoints_it_starts_over():
    log = []
    hooks = [Recorder(log, every=2), Raiser("after_run", AGAIN, step=4)]
    assert train(counted(), 6, hooks).step == 6
    assert [s for _, what, s in log if what == "create"] == [0, 0]


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        ("after_create_session", "AbortedError"),
        ("before_run", "UnavailableError"),
        ("after_run", "AbortedError"),
    ],
)
def test_what_a_hook_raises_again_and_again_is_raised(method, kind, tmp_path):
    """Steps in between would otherwise make each a new failure."""
    error = getattr(tf.errors, kind)(None, None, "the user's own")
    at = None if method == "after_create_session" else 4
    build = counted()
    with pytest.raises(type(error), match="the user's own"):
        train(
            build,
            6,
            [Recorder([], every=2), Raiser(method, error, at, times=20)],
            checkpoint_dir=str(tmp_path),
            save_checkpoint_steps=3,
        )
    assert len(build.made) == recovery.MAX_REPEATS


def test_what_passes_is_recovered_from():
    error = tf.errors.UnavailableError(None, None, "for a while")
    build = counted()
    train(build, 6, [Raiser("after_run", error, times=2)])
    assert len(build.made) == 3


@pytest.mark.slow
def test_ten_failures_without_a_step_are_raised():
    failures = [1] * 99
    with pytest.raises(tf.errors.UnavailableError, match="a server is gone"):
        count([], 5, fail_at=failures)


def test_other_errors_are_raised_at_once():
    error = tf.errors.InvalidArgumentError(None, None, "wrong")
    build = counted()
    with pytest.raises(tf.errors.InvalidArgumentError, match="wrong"):
        train(build, 5, [Raiser("after_run", error)])
    assert len(build.made) == 1


def test_pages_of_an_error_end_with_its_line():
    text = "Graph execution error:\n\nDetected at node SaveV2\n  at line 7\n"
    text += "2 root error(s) found.\n  (0) RESOURCE_EXHAUSTED: No space left\n"
    error = tf.errors.ResourceExhaustedError(None, None, text + "\t[[node]]\n")
    with pytest.raises(tf.errors.ResourceExhaustedError) as raised:
        train(counted(), 5, [Raiser("after_run", error)])
    assert raised.value.__notes__ == ["RESOURCE_EXHAUSTED: No space left"]


@pytest.fixture
def restarts(monkeypatch):
    """A restart of the process ends the test with `SystemExit` instead."""

    def restart(reason):
        raise SystemExit(reason)

    monkeypatch.delenv("TFDIST_FAILURES", raising=False)
    monkeypatch.setattr(recoverable, "restart_process", restart)


@pytest.mark.usefixtures("restarts")
@pytest.mark.parametrize(
    ("error", "found"),
    [
        (ServerLostError({"ps:0": FROZEN}), {}),
        (CANCELLED, {"ps:0": FROZEN}),
    ],
)
def test_a_server_lost_at_the_end(error, found):
    class Loses(SessionRunHook):
        def end(self, session):
            session._health = mock.Mock()
            session._health.look.return_value = found
            raise error

    with pytest.raises(SystemExit, match=r"^ps:0 does not answer$"):
        train(counted(), 2, [Loses()])


@pytest.mark.usefixtures("restarts")
def test_a_process_lost_at_the_end():
    """In all-reduce; an error of the user's own hook is raised in the end."""

    class Loses(SessionRunHook):
        def end(self, session):
            session._in_sync = True
            raise tf.errors.UnavailableError(None, None, "worker:0 is gone")

    for _ in range(recovery.MAX_REPEATS - 1):
        with pytest.raises(SystemExit, match="worker:0 is gone"):
            train(counted(), 2, [Loses()])
    with pytest.raises(tf.errors.UnavailableError, match="worker:0 is gone"):
        train(counted(), 2, [Loses()])


def test_other_variables_the_second_time():
    first, second = make(), make(hidden=more)
    builds = iter([first, second])
    with pytest.raises(ValueError, match="more/kernel: missing, then"):
        train(lambda: next(builds)(), 5, [Raiser("before_run", AGAIN)])


def test_checkpoints_of_another_model(tmp_path):
    train(make(), 2, checkpoint_dir=str(tmp_path))
    other = make(hidden=more)
    with pytest.raises(ValueError, match=r"more/kernel: shape .* missing"):
        train(other, 4, checkpoint_dir=str(tmp_path))


@pytest.mark.parametrize(
    "kind",
    [
        "data cut",
        pytest.param("index cut", marks=pytest.mark.slow),
        pytest.param("data gone", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_passed_over(kind, tmp_path, caplog):
    options = {"checkpoint_dir": str(tmp_path), "save_checkpoint_steps": 2}
    train(counted(), 4, **options)
    data = tmp_path / "model.ckpt-4.data-00000-of-00001"
    if kind == "data gone":
        data.unlink()
    else:
        path = data if kind == "data cut" else tmp_path / "model.ckpt-4.index"
        os.truncate(path, path.stat().st_size // 2)
    session = train(counted(), 6, **options)
    assert session.restored_from.endswith("model.ckpt-2")
    assert session.step == 6
    assert "model.ckpt-4 is damaged" in caplog.text


@pytest.mark.slow
def test_every_checkpoint_is_damaged(tmp_path):
    train(counted(), 2, checkpoint_dir=str(tmp_path))
    for path in tmp_path.glob("model.ckpt-*.data*"):
        os.truncate(path, 10)
    with pytest.raises(ValueError, match="Every checkpoint in"):
        train(counted(), 4, checkpoint_dir=str(tmp_path))


def test_a_file_that_is_too_large_is_no_end_of_the_data(tmp_path):
    """TensorFlow reports it as it reports the end of a dataset."""

    class Limit(SessionRunHook):
        def after_run(self, run_context, run_values):
            resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    options = {"save_checkpoint_steps": 2, "save_summaries_steps": 0}
    try:
        with pytest.raises(OSError, match=r"ckpt-2_temp.*too large"):
            train(counted(), 9, [Limit()], checkpoint_dir=tmp_path, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    session = train(counted(), 4, checkpoint_dir=tmp_path, **options)
    assert session.restored_from.endswith("model.ckpt-0")
    assert session.step == 4


def test_sigterm_saves_and_asks_to_be_started_again(tmp_path):
    class Terminate(SessionRunHook):
        def steps_until_next(self, step):
            return 4 - step % 4

        def after_run(self, run_context, run_values):
            if run_context.session.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    log, before = [], signal.getsignal(signal.SIGTERM)
    hooks = [Recorder(log), Terminate()]
    with pytest.raises(SystemExit) as exit_:
        train(counted(), 90, hooks, checkpoint_dir=str(tmp_path))
    assert exit_.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before
    assert "end" not in [what for _, what, _ in log]
    session = train(counted(), 7, checkpoint_dir=str(tmp_path))
    assert session.restored_from.endswith("model.ckpt-4")


def test_who_is_not_the_chief_waits_for_a_checkpoint(tmp_path):
    options = {"checkpoint_dir": str(tmp_path), "is_chief": False}
    with pytest.raises(TimeoutError, match=r"no checkpoint .* within 0\.1 s"):
        MonitoredTrainingSession(counted(), max_wait_secs=0.1, **options)
    train(counted(), 3, checkpoint_dir=str(tmp_path))
    files = sorted(tmp_path.iterdir())
    session = train(counted(), 5, max_wait_secs=9, **options)
    assert session.step == 5
    assert sorted(tmp_path.iterdir()) == files


def test_what_is_being_written_is_removed_by_the_chief_alone(tmp_path):
    """If another process removed it, the chief's save would fail."""
    train(counted(), 3, checkpoint_dir=str(tmp_path))
    part = tmp_path / "model.ckpt-9_temp" / "part-0"
    part.parent.mkdir()
    part.touch()
    train(counted(), 5, checkpoint_dir=str(tmp_path), is_chief=False)
    variables = {"w": tf.Variable(0.0), "global_step": tf.Variable(np.int64())}
    assert checkpoints.Checkpoints(str(tmp_path), variables).restore()
    assert part.exists()
    train(counted(), 5, checkpoint_dir=str(tmp_path))
    assert not part.parent.exists()


def test_what_a_kill_has_left_is_removed_wherever_is_saved(tmp_path):
    """Also the temporary file of TensorFlow's list of checkpoints."""
    first, second = tmp_path / "first", tmp_path / "second"
    for last_step in (2, 4):
        for directory in (first, second) if last_step == 4 else ():
            (directory / "model.ckpt-9_temp").mkdir()
            (directory / "checkpoint.tmp0123abcd").touch()
        saver = CheckpointSaverHook(second, save_steps=1)
        train(counted(), last_step, checkpoint_dir=first, hooks=[saver])
    assert not [*tmp_path.glob("*/*_temp"), *tmp_path.glob("*/*.tmp*")]


def test_a_directory_may_be_a_path(tmp_path):
    for last_step in (2, 4):
        session = train(
            counted(), last_step, checkpoint_dir=tmp_path, summary_dir=tmp_path
        )
    assert session.restored_from == str(tmp_path / "model.ckpt-2")


def test_variables_of_keras(tmp_path):
    def build():
        step, weight = tf.Variable(np.int64(0)), keras.Variable(0.0)

        def run():
            step.assign_add(1)
            weight.assign(weight + 2)

        return Trainable(run, step, {"weight": weight})

    for last_step in (2, 3):
        session = train(build, last_step, checkpoint_dir=str(tmp_path))
    assert session.variables["weight"].numpy() == 6


# --- Exact resumption --------------------------------------------------------


GLOROT = keras.initializers.GlorotUniform(seed=5)


def shuffled():
    """Batches whose order is determined by the position alone."""
    return batches(64, 4).shuffle(16, seed=3).repeat().prefetch(2)


@pytest.mark.slow
def test_interrupted_is_as_uninterrupted(tmp_path):
    """Weights, slots, dropout masks and the next batch are identical."""

    def build():
        keras.utils.set_random_seed(1)  # Also of what is made before the model.
        return make(
            shuffled(),
            metrics=["accuracy"],
            hidden=lambda: [
                keras.layers.Dense(4, kernel_initializer=GLOROT, name="hidden"),
                keras.layers.Dropout(0.5, seed=7),
            ],
        )

    whole = build()
    train(whole, 12)
    for max_steps in (5, 8):
        train(build(), max_steps, checkpoint_dir=str(tmp_path))
    resumed = build()
    hooks = [Raiser("after_run", AGAIN, step=10)]
    train(
        resumed,
        12,
        hooks,
        checkpoint_dir=str(tmp_path),
        save_checkpoint_steps=1,
    )
    assert len(resumed.made) == 2
    assert_same(values(resumed.made[-1]), values(whole.made[-1]))


def test_another_input_is_read_from_its_start(tmp_path, caplog):
    """Even if its ops are the same: other files, or another batch size."""
    first, second = batches(64, 4).repeat(), batches(64, 8).repeat()

    def build(dataset):
        keras.utils.set_random_seed(1)
        return make(dataset)

    whole = build(first.take(3).concatenate(second))
    train(whole, 5)
    train(build(first), 3, checkpoint_dir=str(tmp_path))
    resumed = build(second)
    train(resumed, 5, checkpoint_dir=str(tmp_path))
    assert_same(values(resumed.made[-1]), values(whole.made[-1]))
    assert caplog.text.count("belongs to a different input") == 1


def test_an_input_whose_position_cannot_be_saved(tmp_path, caplog):
    def generate():
        while True:
            yield np.ones([8, 4], "float32"), np.ones([8, 1], "float32")

    spec = (tf.TensorSpec([8, 4]), tf.TensorSpec([8, 1]))
    dataset = tf.data.Dataset.from_generator(generate, output_signature=spec)
    train(make(dataset), 3, checkpoint_dir=str(tmp_path))
    assert caplog.text.count("position of the input cannot be saved") == 1
    assert train(make(dataset), 5, checkpoint_dir=str(tmp_path)).step == 5


@pytest.mark.slow
def test_a_step_that_never_succeeds_ends_the_job(tmp_path):
    """Even though the chief of a cluster restarts its process meanwhile."""
    program = (
        "import tensorflow as tf, tfdist\n"
        "from tfdist.cluster import servers\n"
        "def build(strategy):\n"
        "    def step():\n"
        "        raise tf.errors.UnavailableError(None, None, 'never works')\n"
        "    with strategy.scope():\n"
        "        count = tf.Variable(0, dtype=tf.int64)\n"
        "    return tfdist.Trainable(step, count, {})\n"
        "cluster = tfdist.Cluster.from_env()\n"
        "if cluster.role != 'chief':\n"
        "    servers.serve(cluster)\n"
        "else:\n"
        "    with tfdist.MonitoredTrainingSession(\n"
        f"        build, cluster=cluster, checkpoint_dir={str(tmp_path)!r}\n"
        "    ) as session:\n"
        "        session.run()\n"
    )
    with LocalCluster(
        [sys.executable, "-c", program], ps=1, workers=1, restart_secs=None
    ) as job:
        assert job.wait(timeout_secs=180) != 0
        said = job.output("chief:0")
    assert said.count("Failed at step 0") == recovery.MAX_FAILURES
    assert "this process restarts itself" in said
    assert "UnavailableError: never works" in said
