"""Calls hooks around a run: how long it may be, and what they fetch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

from tfdist.hooks.session_run_hook import (
    SessionRunArgs,
    SessionRunContext,
    SessionRunValues,
    wants_every_step,
)

UNBOUNDED = 1 << 60


class HookRunner:
    """Calls hooks around a run, as TF1's sessions did.

    Args:
        hooks: Their `before_run` is called at once.
        session: What they get as their session.
    """

    def __init__(
        self,
        hooks: Iterable[tf.compat.v1.train.SessionRunHook],
        session: Any,
    ) -> None:
        self._session = session
        self._context = SessionRunContext(SessionRunArgs(None), session)
        self._asked = [(hook, hook.before_run(self._context)) for hook in hooks]

    def end(self, logs: Mapping[str, float]) -> None:
        """Calls `after_run` with what each hook asked for; default: `logs`."""
        for hook, args in self._asked:
            results = logs
            if args is not None:
                results = resolve(args.fetches, logs, self._session.variables)
            values = SessionRunValues(results, None, None)
            hook.after_run(self._context, values)

    @property
    def stop_requested(self) -> bool:
        """Whether a hook asked to stop."""
        return self._context.stop_requested


def resolve(
    fetches: Any, logs: Mapping[str, float], variables: Mapping[str, Any]
) -> Any:
    """`fetches` with each leaf replaced by its value.

    >>> resolve({"a": "loss", "b": ["step"]}, {"loss": 0.5},
    ...         {"step": tf.Variable(3)})
    {'a': 0.5, 'b': [np.int32(3)]}

    Args:
        fetches: A structure (`tf.nest`) of names and variables. A name is
            first looked up in `logs`.
        logs: Name to value.
        variables: Name to variable; one in shards is gathered.

    Raises:
        ValueError: a name is in neither.
    """

    def value(fetch: Any) -> Any:
        if isinstance(fetch, str):
            if fetch in logs:
                return logs[fetch]
            if fetch not in variables:
                raise ValueError(
                    f"There is no log and no variable called {fetch!r}. "
                    f"Logs: {sorted(logs)}. Variables: {sorted(variables)}."
                )
            fetch = variables[fetch]
        return tf.convert_to_tensor(fetch).numpy()

    return tf.nest.map_structure(value, fetches)


def steps_allowed(
    hooks: Iterable[tf.compat.v1.train.SessionRunHook], step: int, most: int
) -> tuple[int, int]:
    """Steps to run, and how many more may be under way then.

    As many as every hook allows, and at most `most`.

    Args:
        hooks: The hooks.
        step: The global step now.
        most: How many steps a run may have at most.

    Raises:
        ValueError: a hook asks for less than one step.
    """
    until = UNBOUNDED  # Until no other step may be under way.
    for hook in hooks:
        ask = getattr(hook, "steps_until_next", lambda step: None)
        wish = 1 if wants_every_step(hook) else ask(step)
        if wish is None:
            continue
        if wish < 1:
            raise ValueError(
                f"{type(hook).__name__}.steps_until_next must return None or "
                f"at least 1. Received: {wish} at step {step}."
            )
        most = min(most, wish)
        if getattr(hook, "wants_none_under_way", False):
            until = min(until, wish)
    return most, max(0, until - most)
