"""`fit`: a Keras-style interface to the same jobs, in epochs."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import logging
import os
import tempfile
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.arguments import check_at_least
from tfdist._tf.tracing import check_tensorflow
from tfdist.cluster.size import ClusterSize
from tfdist.cluster.spec import Cluster
from tfdist.cluster.strategies import multi_worker_strategy
from tfdist.data import fit_data
from tfdist.data.input_fns import takes_context, without_context
from tfdist.estimator import results
from tfdist.estimator.building import ModelFn
from tfdist.estimator.estimator import Estimator
from tfdist.estimator.fit_history import EpochHistory, HistoryKeeper
from tfdist.estimator.run_config import RunConfig
from tfdist.estimator.specs import EvalSpec, TrainSpec
from tfdist.estimator.training import train_and_evaluate
from tfdist.hooks.callbacks import Callback, KerasCallbackHook
from tfdist.hooks.session_run_hook import SessionRunHook

_log = logging.getLogger(__name__)

_WEIGHTS = "pass a weight for each example, as in `train=(x, y, weights)`"
# Arguments of Keras' `fit`, and what replaces them here.
_INSTEAD = {
    **dict.fromkeys(("x", "y"), "pass `train=(x, y)`"),
    **dict.fromkeys(("class_weight", "sample_weight"), _WEIGHTS),
    "verbose": "`log_step_count_steps` sets how often progress is shown",
    "initial_epoch": "a job resumes from the checkpoint in its `model_dir`",
    "validation_split": "split the arrays, and pass `validation_data`",
    "validation_freq": "`save_checkpoints_steps` sets how often to evaluate",
    "validation_batch_size": "pass a function that returns a batched dataset",
}


def fit(
    model_fn: ModelFn,
    train: Any,
    validation_data: Any = None,
    epochs: int = 1,
    steps_per_epoch: int | None = None,
    callbacks: Sequence[Callback] | Callback | None = None,
    *,
    batch_size: int | None = None,
    shuffle: bool = True,
    validation_steps: int | None = None,
    hooks: Iterable[SessionRunHook] | None = None,
    model_dir: str | None = None,
    **config: Any,
) -> tuple[keras.Model | None, keras.callbacks.History | None]:
    """Trains like Keras' `fit`, in this process or on its cluster.

    The same program runs in every task and trains by `train_and_evaluate`.

    >>> def model_fn():
    ...     model = keras.Sequential([keras.Input([1]), keras.layers.Dense(1)])
    ...     model.compile(optimizer="sgd", loss="mse")
    ...     return model
    >>> x, y = np.ones([8, 1]), np.ones([8, 1])
    >>> model, history = tfdist.fit(
    ...     model_fn, (x, y), validation_data=(x, y), epochs=2,
    ...     log_step_count_steps=None)
    >>> history.epoch, sorted(history.history)
    ([0, 1], ['loss', 'val_loss'])

    Differences from `keras.Model.fit`, in addition to `DIFFERS_FROM_FIT.md`:

    * With `steps_per_epoch`, a finite dataset is repeated, so that every epoch
      has the same number of steps.
    * On parameter servers an epoch has as many steps as `train` has batches,
      whichever workers run them; with `backup_workers`, as many as take these
      batches, one for each worker that a step waits for, rounded up. Arrays
      are split between the workers; a function without an argument is read by
      each worker from the start.
    * A call with the `model_dir` of an earlier call resumes its job: `epochs`
      is the total for the job. If a process has died, the `History` includes
      the epochs before, and `ModelCheckpoint`, `ReduceLROnPlateau`, and
      `EarlyStopping` without `restore_best_weights`, go on from their state
      after them; others start over. If the job has ended, also because a
      callback stopped it, the call trains nothing, calls no callback, and
      returns the same `History`, kept in `<model_dir>/fit_history.json`. With
      more `epochs`, or without this file, it trains on; all start over.

    Args:
        model_fn: As for `Estimator`.
        train: Arrays `x`, `(x, y)` or `(x, y, sample_weight)`, each of which
            may be a data frame, or a mapping or list of arrays; or a function,
            as for `TrainSpec`; or, without parameter servers, a
            `tf.data.Dataset` of batches or a `keras.utils.PyDataset`.
        validation_data: Like `train`, evaluated at each checkpoint. With
            parameter servers, a `tf.data.Dataset` is not accepted.
        epochs: Number of epochs. As in Keras, `keras.config.max_epochs()` and
            `max_steps_per_epoch()` limit epochs and steps, with a warning.
        steps_per_epoch: Default: the number of batches in `train`. Required if
            `train` is infinite, or a function of an `InputContext`.
        callbacks: See `tfdist.hooks.KerasCallbackHook`.
        batch_size: Batch size for arrays. Default: 32.
        shuffle: Whether to reorder arrays, and the batches of a `PyDataset`, in
            each epoch.
        validation_steps: Batches per evaluation, at most. Default: all.
        hooks: As for `TrainSpec`.
        model_dir: See `RunConfig`. Default: a temporary directory, which is
            removed; required on a cluster.
        **config: Arguments for `RunConfig`. By default a checkpoint is saved at
            the end of each epoch.

    Returns:
        The model of the last checkpoint and a `History`, in a single process,
        on the chief, and in each process of an all-reduce job. Workers and
        servers of other clusters serve until the end and return
        `(None, None)`; an evaluator returns the same immediately.

    Raises:
        TypeError: unsupported data; an unknown argument.
        ValueError: a number out of range; no `model_dir` on a cluster; data
            that are empty or that workers cannot read; and as for
            `Estimator.train`.
        RuntimeError: as for `RunConfig`.
    """
    _check_known(config)
    check_at_least("epochs", epochs, 1)
    check_at_least("steps_per_epoch", steps_per_epoch, 1)
    check_at_least("batch_size", batch_size, 1)
    check_tensorflow()
    epochs = _limited("epochs", epochs, keras.config.max_epochs())
    arrays = any(map(fit_data.is_arrays, (train, validation_data)))
    if batch_size and not arrays:
        raise ValueError(
            "Argument `batch_size` is for arrays; other data must be batched "
            f"already. Received: batch_size={batch_size}."
        )
    cluster = config.pop("cluster", None) or Cluster.from_env()
    if cluster.role == "evaluator":
        return None, None
    # The chief evaluates.
    cluster = dataclasses.replace(cluster, has_evaluator=False)
    with contextlib.ExitStack() as stack:
        if model_dir is None:
            if cluster.role != "local":
                raise ValueError(
                    "Argument `model_dir` must name a directory that all tasks "
                    f"of the cluster can reach. Received: None in {cluster}."
                )
            model_dir = stack.enter_context(tempfile.TemporaryDirectory())
        run = RunConfig(model_dir, cluster=cluster, **config)
        on_ps = run.strategy_name == "ps"
        once, endless = fit_data.input_fns(
            train,
            "train",
            batch_size=batch_size,
            shuffle=shuffle,
            # Derived from the job, so that a restart keeps the same order.
            seed=zlib.crc32(run.model_dir.encode()),
            on_ps=on_ps,
        )
        if not cluster.trains or (on_ps and not cluster.is_chief):
            serving = Estimator(model_fn, run)
            train_and_evaluate(serving, TrainSpec(endless), None)
            return None, None
        if run.strategy_name == "multi_worker_mirrored":
            # No dataset may be created before the processes are connected.
            size = ClusterSize(cluster, model_dir)
            secs = run.session_creation_timeout_secs
            try:
                multi_worker_strategy(cluster, secs, size=size)
            except TimeoutError:
                if not tf.io.gfile.exists(results.done_path(model_dir)):
                    raise
                # The others may have ended with the job: `train` knows.
                run = run.replace(session_creation_timeout_secs=1)
        if steps_per_epoch is None and takes_context(once):
            raise ValueError(
                "Argument `steps_per_epoch` must be given, since `train` takes "
                "an InputContext: a process cannot know how many batches the "
                "others read."
            )
        steps = steps_per_epoch or fit_data.num_batches(without_context(once)())
        if on_ps and run.backup_workers is not None and not steps_per_epoch:
            steps = -(-steps // (cluster.num_workers - run.backup_workers))
        most = keras.config.max_steps_per_epoch()
        steps = _limited("steps_per_epoch", steps, most)
        if not {"save_checkpoints_steps", "save_checkpoints_secs"} & {*config}:
            run = run.replace(save_checkpoints_steps=steps)
        estimator = Estimator(model_fn, run)
        eval_spec, history = None, EpochHistory()
        if validation_data is not None:
            name = "validation_data"
            if on_ps and isinstance(validation_data, tf.data.Dataset):
                raise fit_data.local_dataset_error(validation_data, name)
            instead = "validation_steps"
            validation_steps = _limited(instead, validation_steps, most)
            eval_fn, _ = fit_data.input_fns(
                validation_data, name, batch_size=batch_size
            )
            if validation_steps is None:
                dataset = without_context(eval_fn)()
                fit_data.check_ends(dataset, name, instead)
            eval_spec = EvalSpec(eval_fn, validation_steps, throttle_secs=0)
        eval_dir = estimator.eval_dir() if eval_spec else None
        given = keras.tree.flatten(callbacks or [])
        hook = KerasCallbackHook([*given, history], steps, eval_dir, epochs)
        path = os.path.join(run.model_dir, "fit_history.json")
        keep = HistoryKeeper(path, steps, epochs * steps, hook, history, given)
        own: tuple[SessionRunHook, ...] = hook, keep
        last_step = keep.max_steps
        if keep.read():
            own, last_step = (), keep.step
        train_spec = TrainSpec(endless, last_step, (*(hooks or ()), *own))
        metrics, _ = train_and_evaluate(estimator, train_spec, eval_spec)
        model = estimator.restored_model()
    history.set_model(model)
    history.replay(keep.earlier)
    metrics = {**(metrics or {})}
    step = metrics.pop("global_step", -1)
    in_last = history.epoch[-1:] == [(step - 1) // steps]
    for name, value in metrics.items():
        # A callback stopped training mid-epoch; it was evaluated afterwards.
        if in_last and step > hook.evaluated_step:
            history.history.setdefault(f"val_{name}", []).append(value)
    model.history = history  # As `fit` of Keras leaves it.
    return model, history


def _limited(argument: str, value: Any, most: int | None) -> Any:
    """Limits `value` as Keras' configuration does, for quick trials."""
    if not most or (value and value <= most):
        return value
    _log.warning("Limiting `%s` to %d, as set in keras.config.", argument, most)
    return most


def _check_known(config: dict[str, Any]) -> None:
    """Raises `TypeError` for an argument that `RunConfig` lacks, too."""
    *own, _ = inspect.signature(fit).parameters  # Not `config` itself.
    known = [*own, *inspect.signature(RunConfig).parameters]
    for name in config:
        if name in _INSTEAD:
            raise TypeError(
                f"Argument `{name}` of Keras' fit is not supported by "
                f"tfdist.fit: {_INSTEAD[name]}."
            )
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f" Did you mean `{near[0]}`?" if near else ""
            raise TypeError(
                f"Argument `{name}` is not accepted by tfdist.fit or "
                f"RunConfig.{meant}"
            )
