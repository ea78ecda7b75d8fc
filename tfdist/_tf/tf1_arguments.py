"""Names what replaces arguments of TF 1 that tfdist's functions do not take."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

_Function = TypeVar("_Function", bound=Callable[..., Any])
_SCAFFOLD = (
    "create and initialize variables in the function that builds the model; "
    "for an `init_fn`, use `warm_start_from` or a hook's `after_create_session`"
)
_INSTEAD = {
    "as_text": "SavedModels are written in binary; saved_model_cli shows them",
    "checkpoint_basename": "checkpoints are named model.ckpt-STEP",
    "config": "there is no session to configure: use `tf.config`",
    "event_file_pattern": "the best result is kept in a file of the exporter",
    "experimental_mode": "export another model with `serving_model_fn`",
    "final_ops_feed_dict": "nothing is fed: pass a function of the session",
    "hooks": "only training and evaluations run them",
    "master": "the cluster is that of `TF_CONFIG`, or the argument `cluster`",
    "params": "use functools.partial(model_fn, ...)",
    "save_graph_def": "no graph is written for TensorBoard",
    "saver": "use `max_to_keep` and `keep_checkpoint_every_n_hours`",
    "scaffold": _SCAFFOLD,
    "serving_input_receiver_fn": "use `serving_model_fn`, see tfdist.Serving",
    "show_dataflow": "TensorBoard's profiler shows it",
    "show_memory": "TensorBoard's profiler shows it",
    "summary_op": "the loss and the compiled metrics are written",
    "summary_writer": "use `output_dir`",
}


def tf1_arguments(function: _Function) -> _Function:
    """Makes a function name what replaces an argument that it had in TF 1.

    >>> @tf1_arguments
    ... def evaluate(steps): ...
    >>> evaluate(1, master="")
    Traceback (most recent call last):
    TypeError: Argument `master` of TF 1 is not taken: the cluster is that ...
    """
    taken = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for name in kwargs:
            if name not in taken and name in _INSTEAD:
                raise TypeError(
                    f"Argument `{name}` of TF 1 is not taken: {_INSTEAD[name]}."
                )
        return function(*args, **kwargs)

    return cast(_Function, checked)
