"""The cluster of the running job: of its `RunConfig`, else the environment's.

What runs inside a user's `model_fn` or `input_fn` does not see the `RunConfig`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from tfdist.cluster.spec import Cluster

_running: list[Cluster] = []


def current_cluster() -> Cluster:
    """That of the innermost running function of `runs_in_its_cluster`."""
    return _running[-1] if _running else Cluster.from_env()


def runs_in_its_cluster(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the cluster of the first argument's `config` the current one."""

    @functools.wraps(function)
    def run(owner: Any, *args: Any, **kwargs: Any) -> Any:
        config = getattr(owner, "config", None)
        _running.append(config.cluster if config else current_cluster())
        try:
            return function(owner, *args, **kwargs)
        finally:
            _running.pop()

    return run
