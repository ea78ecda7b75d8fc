"""Exercises of lesson 7, recovery."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import tfdist
from exercises import Exercise

LAST_STEP = 700  # Of jobs/deaths.py.


def stops_below_one(hook: tfdist.SessionRunHook) -> bool:
    """Exercise 3, where the loss of a step is ten over its number."""

    def build_fn() -> tfdist.Trainable:
        global_step = tf.Variable(0, dtype="int64")

        def step() -> dict[str, tf.Tensor]:
            return {"loss": 10 / global_step.assign_add(1)}

        return tfdist.Trainable(step, global_step, {})

    losses = []

    class Losses(tfdist.SessionRunHook):
        def after_run(self, run_context: Any, run_values: Any) -> None:
            losses.append(float(run_values.results["loss"]))

    hooks = [hook, Losses(), tfdist.StopAtStepHook(last_step=20)]
    with tfdist.MonitoredTrainingSession(build_fn, hooks=hooks) as session:
        while not session.should_stop():
            session.run()
    *before, last = losses
    return last < 1 <= min(before)


def one_costly_death(rows: list[dict[str, Any]]) -> bool:
    """Exercise 4: what the chief of jobs/deaths.py noted."""
    starts = [i for i, row in enumerate(rows) if row["what"] == "session"]
    if len(starts) != 2:
        raise ValueError(f"one death makes two sessions; here: {len(starts)}")
    known = max(row["step"] for row in rows[: starts[1]])
    lost = known - rows[starts[1]]["step"]
    end = rows[-1]
    return lost >= 60 and (end["what"], end["step"]) == ("end", LAST_STEP)


EXERCISES = {
    1: Exercise(
        (
            "Count the runs up to the failure, the failed one included. Which "
            "checkpoint does the session then go back to?",
            "The newest checkpoint is that of the last multiple of four before "
            "the failed step. Count the runs from there to the end as well.",
        ),
        digest="cb8b3a78ef5d94bf1653b521be0ca7ec",
    ),
    2: Exercise(
        (
            "Whose death makes the job repeat steps, and whose does not?",
            "Multiply the deaths per day of those tasks by what one death "
            "costs on average: half the time between two checkpoints.",
        ),
        digest="569734d66158bcc742105e927ffebb93",
    ),
    3: Exercise(
        (
            "`after_run` is the method that sees the logs of a step.",
            "Where the loss is below 1, call `run_context.request_stop()`.",
        ),
        is_right=stops_below_one,
    ),
    4: Exercise(
        (
            "A worker's death repeats no step. What decides how many steps the "
            "death of another task repeats?",
            "The job saves every 100 steps: let a parameter server or the "
            "chief die shortly before a checkpoint is due.",
        ),
        is_right=one_costly_death,
    ),
    5: Exercise(
        (
            "Write a few sentences. Treat workers and servers separately.",
            "How often does one of the servers die, how often would you then "
            "save, and what do saving, repeating and waiting cost together? "
            "Write at least 25 words.",
        )
    ),
}
