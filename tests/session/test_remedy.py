"""Decisions about failures, tested without a cluster."""

import os
import re
from pathlib import Path

import pytest
import tensorflow as tf

from tfdist import session
from tfdist._tf.private import COORDINATOR_ERRORS
from tfdist.cluster.health import ServerFailure, ServerLostError
from tfdist.session import recovery
from tfdist.session.recovery import RecoveryAction
from tfdist.training.fence import Generations

DEAD, FROZEN = (
    {"ps:0": ServerFailure.DEAD},
    {"ps:0": ServerFailure.DEAD, "ps:1": ServerFailure.FROZEN},
)


def op_error(kind, message="m"):
    return getattr(tf.errors, kind)(None, None, message)


@pytest.mark.parametrize(
    ("error", "lost", "failures", "expected"),
    [
        (op_error("AbortedError"), {}, 0, RecoveryAction.REBUILD),
        (op_error("UnavailableError"), {}, 0, RecoveryAction.REBUILD),
        (ServerLostError(DEAD), DEAD, 0, RecoveryAction.REBUILD),
        (op_error("NotFoundError"), DEAD, 0, RecoveryAction.REBUILD),
        (op_error("NotFoundError"), FROZEN, 0, RecoveryAction.RESTART),
        (op_error("AbortedError"), {}, 3, RecoveryAction.RESTART),
        (op_error("AbortedError"), {}, 10, RecoveryAction.RAISE),
        (op_error("InvalidArgumentError"), {}, 0, RecoveryAction.RAISE),
        (
            op_error("InvalidArgumentError", "Unable to find a context_id"),
            {},
            0,
            RecoveryAction.REBUILD,
        ),
        (
            op_error(
                "InvalidArgumentError",
                "Unable to find the relevant tensor remote_handle: Op ID: 3",
            ),
            {},
            0,
            RecoveryAction.REBUILD,
        ),
        (ValueError("the user's"), DEAD, 0, RecoveryAction.RAISE),
        *(
            (error(cause), {}, 0, expected)
            for error in COORDINATOR_ERRORS
            for cause, expected in [
                (op_error("UnavailableError"), RecoveryAction.REBUILD),
                (op_error("DataLossError"), RecoveryAction.RAISE),
            ]
        ),
    ],
)
def test_choose_action(error, lost, failures, expected):
    assert recovery.choose_action(error, lost, failures) is expected


def repeated(failures, *events):
    """Yields for each event whether it is a user error."""
    for message, step, in_hook in events:
        error = op_error("UnavailableError", message)
        error.in_hook = in_hook
        yield failures.is_user_error(error, step)


def test_whose_error_it_is(monkeypatch):
    monkeypatch.delenv("TFDIST_FAILURES", raising=False)
    a, b, later = ("a", 3, True), ("b", 3, True), ("a", 4, True)
    remote = ("a", 3, False)
    new = recovery.Failures
    assert list(repeated(new(), a, a, a)) == [False, False, True]
    assert not any(repeated(new(), a, a, b, a, a, later, a, a))
    assert not any(repeated(new(), *[remote] * 9))
    # Also if the process restarts each time.
    for expected in (False, False, True):
        failures = new()
        assert list(repeated(failures, a)) == [expected]
        failures.keep()
    assert "TFDIST_FAILURES" in os.environ
    new()
    assert "TFDIST_FAILURES" not in os.environ


def test_failures_are_counted_across_processes(monkeypatch):
    """Otherwise a job that fails at its first step would restart forever."""
    monkeypatch.delenv("TFDIST_FAILURES", raising=False)
    for before in (0, 4, 8):
        failures = recovery.Failures()
        assert failures.in_a_row == before
        for _ in range(4):
            failures.add()
        failures.keep()
    failures = recovery.Failures()
    gone = op_error("UnavailableError", "gone")
    action = recovery.choose_action(gone, {}, failures.in_a_row)
    assert action is recovery.RecoveryAction.RAISE
    failures.report(1)
    assert failures.in_a_row == 0


def test_an_interactive_process_is_not_replaced(monkeypatch):
    monkeypatch.setattr("sys.ps1", ">>> ", raising=False)
    with pytest.raises(RuntimeError, match=r"ps:1 froze\. An interactive"):
        recovery.restart_process("ps:1 froze")


def test_a_server_is_named():
    message = str(ServerLostError(FROZEN))
    assert message == "ps:0 is not up; ps:1 does not answer"


def test_only_the_current_generation_passes():
    device = tf.constant(0).device
    generations = Generations([device])

    @tf.function
    def update(variable, generation):
        fence = generations.fence(generation)
        variable.assign_add(fence.passed(device, generation, message)[0])

    counter, message = tf.Variable(0), tf.constant([1])
    first, second = tf.constant(0.0), tf.constant(1.0)
    update(counter, first)
    generations.advance()
    with pytest.raises(tf.errors.InvalidArgumentError, match="Expected size"):
        update(counter, first)
    update(counter, second)
    assert counter.numpy() == 2


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (op_error("UnavailableError"), RecoveryAction.RESTART),
        (op_error("AbortedError"), RecoveryAction.RESTART),
        (op_error("CancelledError"), RecoveryAction.RESTART),
        (op_error("DeadlineExceededError"), RecoveryAction.RESTART),
        (op_error("InvalidArgumentError"), RecoveryAction.RAISE),
        (op_error("OutOfRangeError"), RecoveryAction.RAISE),
        (ValueError("the user's"), RecoveryAction.RAISE),
    ],
)
def test_choose_action_in_sync(error, expected):
    """TensorFlow cannot reconnect the processes of an all-reduce job."""
    assert recovery.choose_action(error, {}, in_sync=True) is expected


def test_the_failure_table_names_tests_that_exist():
    named = set(re.findall(r"\btest_\w+", session.__doc__))
    files = Path(__file__).parents[1].glob("*/test_*.py")
    defined = re.findall(
        r"(?m)^def (test_\w+)", "\n".join(f.read_text() for f in files)
    )
    assert len(named) > 15
    assert not named - {*defined}
