"""Checkpoints that restore into a cluster of any shape (design decision D6)."""

from __future__ import annotations

import itertools
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.errors import summarize_error
from tfdist._tf.private import CheckpointTracedOnce, Saveable
from tfdist.checkpoint.names import GLOBAL_STEP
from tfdist.checkpoint.names import named_variables as named_variables
from tfdist.training.finite import FiniteCheck, NonFiniteVariablesError

_log = logging.getLogger(__name__)

# What an iterator raises whose position cannot be saved.
_NO_POSITION = (tf.errors.FailedPreconditionError, tf.errors.UnimplementedError)
_PREFIX = "variables/"
_SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
_WAYS_OUT = (
    'To go on, write there `model_checkpoint_path: "model.ckpt-STEP"` of one '
    "that is whole; to start over, move all away or choose another model_dir."
)
BASENAME = "model.ckpt"
# Errors in reading that say nothing about the file. TensorFlow has a dozen for
# files that are cut, missing or overwritten, IndexError among them.
NO_DAMAGE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,  # The store's host is not found.
    tf.errors.PermissionDeniedError,
    tf.errors.UnavailableError,
)


class Checkpoints:
    """The checkpoints of a job: `model_dir/model.ckpt-<step>`.

    A thin layer over `tf.train.Checkpoint` and `CheckpointManager`: each
    parameter server writes what it holds, in parallel.

    >>> variables = {"weight": tf.Variable(1.0)}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(step=7)
    >>> os.path.basename(path)
    'model.ckpt-7'

    Args:
        directory: Where the checkpoints are.
        variables: Name to variable, from `named_variables`.
        max_to_keep: Most recent checkpoints kept; `None` or 0 keeps all.
        keep_every_n_hours: In addition keeps one per so many hours.
        iterator_fn: Returns the iterator of the input, whose position is
            saved too, or None. Where it cannot be saved, a warning says so.
        before_save: Called with the step before anything is saved.
        check_numerics: Whether only finite values are saved.

    Attributes:
        position_restored: Whether the input's position was restored.
    """

    def __init__(
        self,
        directory: str,
        variables: Mapping[str, Saveable],
        max_to_keep: int | None = 5,
        keep_every_n_hours: float | None = None,
        iterator_fn: Callable[[], tf.data.Iterator | None] = lambda: None,
        before_save: Callable[[int], None] = lambda step: None,
        check_numerics: bool = True,
    ) -> None:
        _newest(directory)  # Or raises.
        self._directory = directory
        self._variables = dict(variables)
        self._keep = {
            "max_to_keep": max_to_keep or None,
            "keep_checkpoint_every_n_hours": keep_every_n_hours,
        }
        self._iterator_fn = iterator_fn
        self._before_save = before_save
        self.position_restored = False
        self._finite = FiniteCheck(variables) if check_numerics else None
        self._set_iterator(None)

    def _set_iterator(self, iterator: tf.data.Iterator | None) -> None:
        self._iterator = iterator
        parts = {} if iterator is None else {"iterator": iterator}
        self._checkpoint = CheckpointTracedOnce(
            variables=dict(self._variables), **parts
        )
        self._manager = self._manager_of(self._checkpoint)

    def _manager_of(
        self, checkpoint: tf.train.Checkpoint
    ) -> tf.train.CheckpointManager:
        return tf.train.CheckpointManager(
            checkpoint, self._directory, checkpoint_name=BASENAME, **self._keep
        )

    @property
    def latest(self) -> str | None:
        """Path of the newest complete checkpoint, or None."""
        return self._manager.latest_checkpoint

    def prepare(self) -> None:
        """Traces the functions that the first save would trace."""
        self._set_iterator(self._iterator_fn())
        self._checkpoint.trace()
        if self._finite:
            self._finite.trace()

    def save(self, step: int) -> str:
        """Writes `model.ckpt-<step>` and returns its path.

        Raises:
            NonFiniteVariablesError: a variable is not finite.
        """
        self._check_finite(step)
        self._before_save(step)
        iterator = self._iterator_fn()
        if iterator is not self._iterator:
            self._set_iterator(iterator)
        try:
            return self._manager.save(checkpoint_number=step)
        except _NO_POSITION as error:
            # An HTTP request: the store's host is not found.
            if iterator is None or "HTTP request" in error.message:
                raise
            _log.warning(
                "The position of the input cannot be saved: a restored job "
                "will not go on from there. TensorFlow says: %s",
                summarize_error(error),
            )
        self._iterator_fn = lambda: None
        self._set_iterator(None)
        return self._manager.save(checkpoint_number=step)

    def _check_finite(self, step: int) -> None:
        names = self._finite.not_finite() if self._finite else []
        if names:
            raise NonFiniteVariablesError(
                f"At step {step} {len(names)} of {len(self._variables)} "
                f"variables hold NaN or infinite values: "
                f"{', '.join(names[:20])}. They are not saved; the last good "
                f"checkpoint is {self.latest}. Look for NaN among the "
                "features, and for a learning rate that is too large; "
                "`check_numerics=False` saves what is there."
            )

    def restore(self) -> str | None:
        """Restores the newest checkpoint that is whole; returns its path.

        The newest is the one that the file `checkpoint` names: whoever edits
        it goes back to an earlier one, as with TF. Where it is damaged, a
        warning says so, and the one before is taken. None if there is none.

        Raises:
            ValueError: it holds other variables, or every checkpoint is
                damaged, or their list is, or is missing.
        """
        # What saves that were killed have left.
        pattern = os.path.join(self._directory, f"{BASENAME}-*_temp*")
        for path in tf.io.gfile.glob(pattern):
            storage.remove_tree(path)
        paths = listed(self._directory)
        if not paths:
            _check_there_is_none(self._directory)
        for path, older in itertools.zip_longest(paths, paths[1:]):
            try:
                restore(path, self._variables, exact=True)
                self._restore_iterator(path)
                return path
            except (tf.errors.OpError, IndexError, RuntimeError) as error:
                if isinstance(error, NO_DAMAGE):
                    raise
                if older is None:
                    raise ValueError(
                        f"Every checkpoint in {self._directory!r} is damaged: "
                        f"{paths}. Put a whole one there, or choose another "
                        "model_dir to start over."
                    ) from error
                _log.warning(
                    "Checkpoint %s is damaged and is passed over; %s is taken "
                    "instead. TensorFlow says: %s",
                    path,
                    older,
                    str(error).splitlines()[0],
                )
        return None

    def save_position(self, step: int) -> None:
        """Writes where the input is, if that can be saved, and no variable."""
        iterator = self._iterator_fn()
        if iterator is None:
            return
        manager = self._manager_of(tf.train.Checkpoint(iterator=iterator))
        try:
            manager.save(checkpoint_number=step)
        except _NO_POSITION as error:
            _log.warning(
                "The position is not saved: %s", summarize_error(error)
            )

    def restore_from(self, path: str, position: str) -> None:
        """Restores one checkpoint, and the input's position from another."""
        restore(path, self._variables, exact=True)
        if tf.io.gfile.exists(f"{position}.index"):
            self._restore_iterator(position)

    def _restore_iterator(self, path: str) -> None:
        """Goes to the saved position, in an input that is the same."""
        iterator = self._iterator_fn()
        keys = (key for key, _ in tf.train.list_variables(path))
        if iterator is None or not any(k.startswith("iterator/") for k in keys):
            return
        saved = tf.train.Checkpoint(iterator=iterator)
        try:
            saved.restore(path).expect_partial()
            self.position_restored = True
        except tf.errors.OpError as error:
            _log.warning(
                "The input is another than the one whose position %s holds: it "
                "is read from the start. TensorFlow says: %s",
                path,
                error.message.partition("\n")[0],
            )


def latest(directory: str) -> str | None:
    """Path of the newest complete checkpoint in `directory`, or None.

    As `tf.train.latest_checkpoint`, but an error where the directory cannot be
    read (`OpError`), or the list of its checkpoints (`ValueError`): a job would
    start over.

    >>> tfdist.checkpoint.latest(directory) is None
    True
    """
    path = _newest(directory)
    if path is None:
        _check_there_is_none(directory)
    return path


def listed(directory: str) -> list[str]:
    """The checkpoints of `directory`, the newest first.

    Where the list was edited to go back, from the one in its first line on.
    """
    first = _newest(directory)
    state = tf.train.get_checkpoint_state(directory)
    paths = list(state.all_model_checkpoint_paths)[::-1] if state else []
    if first in paths:
        return paths[paths.index(first) :]
    return [first, *paths] if first else paths


def _check_there_is_none(directory: str) -> None:
    """Raises unless `directory` can be read and lists no checkpoint."""
    path = os.path.join(directory, "checkpoint")
    if storage.read_text(path):
        raise ValueError(
            f"{path!r} lists checkpoints, and none of them can be found, or "
            f"the list is damaged. {_WAYS_OUT}"
        )
    # A job that was killed while it saved its first state has no list yet.
    later = os.path.join(directory, f"{BASENAME}-[1-9]*.index")
    if found := tf.io.gfile.glob(later):
        raise ValueError(
            f"{path!r} is missing, which lists the checkpoints, and there are "
            f"{sorted(found)}: a job would begin at step 0 and overwrite them. "
            f"{_WAYS_OUT}"
        )


def _newest(directory: str) -> str | None:
    """As `tf.train.latest_checkpoint`; says where a list is that is no text."""
    try:
        return tf.train.latest_checkpoint(directory)
    except UnicodeDecodeError as error:
        raise ValueError(
            f"'{directory}/checkpoint', the list of checkpoints, is damaged: "
            f"{error}. {_WAYS_OUT}"
        ) from error


def restore(
    path: str, variables: Mapping[str, Saveable], exact: bool = False
) -> None:
    """Assigns the values in checkpoint `path` to `variables`, by name.

    Args:
        path: The checkpoint.
        variables: Name to variable.
        exact: Whether the checkpoint must hold nothing but `variables`.

    Raises:
        ValueError: the variables differ; the message lists in what.

    >>> saved, empty = tf.Variable(1.0), tf.Variable(0.0)
    >>> variables = {"weight": saved}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(1)
    >>> tfdist.checkpoint.restore(path, {"weight": empty})
    >>> float(empty)
    1.0
    """
    saved = saved_shapes(path)
    problems = [
        f"  {name}: shape {tuple(v.shape)} in the model, "
        + (f"{tuple(saved[name])}" if name in saved else "missing")
        + " in the checkpoint"
        for name, v in variables.items()
        if saved.get(name) != list(v.shape)
    ]
    if exact:
        problems += [
            f"  {name}: missing in the model, shape {tuple(shape)} in the "
            "checkpoint"
            for name, shape in saved.items()
            if name not in variables
        ]
    if problems:
        raise ValueError(
            f"Checkpoint {path} does not fit the model:\n"
            + "\n".join(problems)
            + "\nIt was written by another model function. Restore the "
            "matching code, or choose another model_dir."
        )
    checkpoint = tf.train.Checkpoint(variables=dict(variables))
    checkpoint.restore(path).expect_partial()
    for whole in variables.values():
        for shard in getattr(whole, "variables", ()):
            if isinstance(shard, tf.distribute.DistributedValues):
                # TensorFlow has restored the copy of the first replica alone.
                shard.assign(tf.convert_to_tensor(shard))


def saved_shapes(path: str) -> dict[str, Sequence[int]]:
    """Name to shape of every variable in checkpoint `path`."""
    return {
        _decoded(key.removeprefix(_PREFIX).removesuffix(_SUFFIX)): shape
        for key, shape in tf.train.list_variables(path)
        if key.startswith(_PREFIX)
    }


def _decoded(key: str) -> str:
    """The name that TensorFlow has written as a part of a key.

    >>> _decoded("encoder..Self.Sq")
    'encoder.Self/q'
    """
    return re.sub(r"\.[.S]", lambda m: "." if m[0] == ".." else "/", key)


def load_variable(path: str, name: str) -> np.ndarray:
    """The value of a variable in checkpoint `path`, whatever its shards.

    >>> variables = {"weight": tf.Variable([1.0, 2.0])}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(1)
    >>> tfdist.checkpoint.load_variable(path, "weight")
    array([1., 2.], dtype=float32)
    """
    key = name.replace(".", "..").replace("/", ".S")
    return tf.train.load_variable(path, f"{_PREFIX}{key}{_SUFFIX}")


def step_of(path: str) -> int:
    """The step at which checkpoint `path` was written.

    >>> variables = {"global_step": tf.Variable(7, dtype=tf.int64)}
    >>> path = tfdist.checkpoint.Checkpoints(directory, variables).save(7)
    >>> tfdist.checkpoint.step_of(path)
    7
    """
    return int(load_variable(path, GLOBAL_STEP))
