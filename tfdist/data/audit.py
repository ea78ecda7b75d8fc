"""Checks, without a cluster, whether workers read different examples.

    python -m tfdist.audit --workers=4 --input=package.module:input_fn

runs the input pipelines of four workers in this process. For each pair of
workers it prints the share of common examples, at the same step and overall; it
also prints how many examples no worker reads and how well they are shuffled.
Workers that get the same batch at the same step compute the same gradients,
however well the files are shuffled: 100 % in the table, and exit code 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_at_least, load_function
from tfdist.data.input_fns import InputFn, described, with_context

# Two workers that share at least this much of each batch do the same work.
_MOST_SHARED = 0.5
# An infinite dataset is read until a batch has nothing new, but no further.
_MOST_BATCHES = 10_000

Batches = list[np.ndarray]  # An int64 for each example of each batch.


@dataclasses.dataclass(frozen=True)
class Audit:
    """The examples that several workers read.

    Attributes:
        input_fn: The name of the input function.
        batches: The batches of each worker, with an int64 fingerprint for each
            example, which is the same for equal examples.
        known: The fingerprints of all examples.
        in_order: Whether `known` is in the order of the files.
    """

    input_fn: str
    batches: tuple[Batches, ...]
    known: np.ndarray
    in_order: bool

    @property
    def at_the_same_step(self) -> np.ndarray:
        """`(workers, workers)`: the mean share of a batch that both read.

        The share is relative to the smaller of the two batches.
        """
        return self._pairs(_shared_by_step)

    @property
    def in_all(self) -> np.ndarray:
        """`(workers, workers)`: the share of all examples that both read."""
        return self._pairs(
            lambda a, b: _shared(np.unique(_all(a)), np.unique(_all(b)))
        )

    @property
    def repeated(self) -> int:
        """The number of examples read more than once in the first pass.

        A pass counts as an equal number of examples per worker.
        """
        share = len(self.known) // len(self.batches)
        first = np.concatenate([_all(each)[:share] for each in self.batches])
        return len(first) - len(np.unique(first))

    @property
    def alone(self) -> list[float]:
        """For each worker, the share of all examples that it ever reads."""
        read = map(_all, self.batches)
        return [float(np.isin(self.known, each).mean()) for each in read]

    @property
    def unread(self) -> np.ndarray:
        """Indices into `known` of the examples that no worker reads."""
        read = np.concatenate([_all(batches) for batches in self.batches])
        return np.flatnonzero(~np.isin(self.known, read))

    @property
    def spread(self) -> list[float]:
        """For each worker, the distance in the files of consecutive examples.

        0 in the order of the files, 1 in a random order. NaN if the order of
        the files is not known.
        """
        place = {example: i for i, example in enumerate(self.known.tolist())}
        spreads = [float("nan")] * len(self.batches)
        for i, batches in enumerate(self.batches if self.in_order else ()):
            read = [place[e] for e in _all(batches).tolist() if e in place]
            # Ranks among the worker's own examples.
            own, ranks = np.unique(read, return_inverse=True)
            if len(own) > 2:
                # The mean distance in a random order of n is (n + 1) / 3.
                distance = np.abs(np.diff(ranks)).mean()
                spreads[i] = float((distance - 1) / ((len(own) + 1) / 3 - 1))
        return spreads

    def problems(self) -> list[str]:
        """The problems found, one sentence each; empty if there are none."""
        found = []
        shared = np.triu(self.at_the_same_step, 1)
        one, other = map(int, np.unravel_index(shared.argmax(), shared.shape))
        most = shared.max()
        if most >= _MOST_SHARED:
            found.append(_same_examples(self.input_fn, one, other, most))
        if unread := len(self.unread):
            every = len(self.known)
            found.append(f"Nobody reads {unread} of {every} examples.")
        low = [str(i) for i, spread in enumerate(self.spread) if spread < 0.1]
        if low:
            found.append(
                f"Worker {', '.join(low)} reads in the order of the files: a "
                "batch contains examples that are adjacent there. Shuffle."
            )
        return found

    def table(self) -> str:
        """The whole audit as text."""
        lines = [
            f"{len(self.batches)} workers of input function {self.input_fn}",
            "",
            "worker   batches  examples  distinct  shuffled",
        ]
        workers = zip(self.batches, self.spread, strict=True)
        for i, (batches, spread) in enumerate(workers):
            read = _all(batches)
            shown = "?" if np.isnan(spread) else f"{min(spread, 1):.0%}"
            lines.append(
                f"{i:>6} {len(batches):>9} {len(read):>9} "
                f"{len(np.unique(read)):>9} {shown:>9}"
            )
        for title, shares in (
            ("shared at the same step", self.at_the_same_step),
            ("shared in all that was read", self.in_all),
        ):
            header = "".join(f"{i:>7}" for i in range(len(shares)))
            lines += ["", title, "worker" + header]
            for i, row in enumerate(shares):
                cells = [f"{share:>7.0%}" for share in row]
                cells[i] = f"{'-':>7}"
                lines.append(f"{i:>6}" + "".join(cells))
        lines += [
            "",
            f"read by nobody: {len(self.unread)} of {len(self.known)}",
            f"read twice in the first pass: {self.repeated}",
            "share of all examples that a worker reads in the end: "
            + ", ".join(f"{share:.0%}" for share in self.alone),
        ]
        return "\n".join(lines + [f"problem: {p}" for p in self.problems()])

    def _pairs(self, share: Callable[[Batches, Batches], float]) -> np.ndarray:
        shares = np.eye(len(self.batches))
        each = enumerate(self.batches)
        for (i, one), (j, other) in itertools.combinations(each, 2):
            shares[i, j] = shares[j, i] = share(one, other)
        return shares


def audit(
    input_fn: InputFn,
    num_workers: int,
    num_batches: int | None = None,
    *,
    in_order: InputFn | None = None,
    index_as_tensor: bool = False,
    seed: int | None = None,
) -> Audit:
    """Compares the examples that the workers of a `tfdist.Estimator` read.

    Args:
        input_fn: An input function, as for a `TrainSpec`.
        num_workers: Number of workers.
        num_batches: Batches to read per worker. Default: all of a finite
            dataset; of an infinite one, until none is new, at most 10,000.
        in_order: An input function that returns every example once, in the
            order of the files, to measure the shuffling. Default: the order is
            not known, and the examples are those that a single worker reads.
        index_as_tensor: Whether to trace the function once for all workers,
            with the worker's index as a tensor, as under a parameter-server
            strategy, instead of calling it per worker, as under all others.
        seed: `tf_random_seed` of the RunConfig. Default: that of
            `tf.random.set_seed` in this process.

    Returns:
        An `Audit`: `print(audit(...).table())`.

    Raises:
        ValueError: A number is not positive, or the dataset has no batches.
    """
    check_at_least("num_workers", num_workers, 1)
    check_at_least("num_batches", num_batches, 1)
    found = _read_workers(
        input_fn, num_workers, num_workers, num_batches, index_as_tensor, seed
    )
    (every,) = _read_workers(in_order or input_fn, 1, 1, None, False, seed)
    known = _all(every)
    first = np.sort(np.unique(known, return_index=True)[1])
    name = described(input_fn)
    return Audit(name, tuple(found), known[first], in_order is not None)


def check_workers_differ(
    input_fn: InputFn,
    num_workers: int,
    *,
    index_as_tensor: bool = False,
    seed: int | None = None,
) -> str | None:
    """Checks whether the first two workers read the same two batches.

    >>> def input_fn():
    ...     return tf.data.Dataset.range(8).batch(2)
    >>> print(check_workers_differ(input_fn, 2).partition(" (")[0])
    Workers 0 and 1 read the same examples at the same step

    The arguments are those of `audit`. Returns a warning that names the input
    function and a remedy; None if the batches differ or there is one worker.
    """
    if num_workers < 2:
        return None
    first, second = _read_workers(
        input_fn, num_workers, 2, 2, index_as_tensor, seed
    )
    shared = _shared_by_step(first, second)
    # Examples that are all equal prove nothing.
    if shared < _MOST_SHARED or len(np.unique(_all(first))) < 2:
        return None
    return _same_examples(described(input_fn), 0, 1, shared)


def fingerprints(batch: Any) -> np.ndarray:
    """Returns an int64 `(batch,)`, with equal numbers for equal examples."""
    columns = [_rows(tensor) for tensor in tf.nest.flatten(batch)]
    if len({*map(len, columns)}) > 1:
        shapes = tf.nest.map_structure(lambda tensor: tensor.shape, batch)
        raise ValueError(
            "The dataset must give batches: tensors whose first dimension is "
            f"the batch, the same for all. Received shapes: {shapes}."
        )
    rows = map(b"".join, zip(*columns, strict=True))
    digests = (hashlib.blake2b(row, digest_size=8).digest() for row in rows)
    return np.frombuffer(b"".join(digests), np.int64)


def _rows(tensor: Any) -> list[bytes]:
    """Returns the bytes of each example in a tensor."""
    if isinstance(tensor, tf.Tensor):
        values = tensor.numpy().reshape(len(tensor), -1)
        if tensor.dtype != tf.string:
            return [row.tobytes() for row in np.ascontiguousarray(values)]
        return [repr(row).encode() for row in values.tolist()]
    rows = tf.data.Dataset.from_tensor_slices(tensor)
    # Without the shape of a sparse row, which depends on its batch.
    parts = (
        [row.indices, row.values]
        if isinstance(row, tf.SparseTensor)
        else tf.nest.flatten(row, expand_composites=True)
        for row in rows
    )
    lists = ([part.numpy().tolist() for part in row] for row in parts)
    return [repr(values).encode() for values in lists]


def _same_examples(input_fn: str, one: int, other: int, share: float) -> str:
    return (
        f"Workers {one} and {other} read the same examples at the same step "
        f"({share:.0%} of a batch), so they compute the same gradients. They "
        f"come from input function {input_fn}. Let it take the InputContext "
        "that it gets and use `dataset.shard(context.num_input_pipelines, "
        "context.input_pipeline_id)`, or `tfdist.read_csv(..., "
        "context=context)` and its like."
    )


def _read_workers(
    input_fn: InputFn,
    num_workers: int,
    num_read: int,
    num_batches: int | None,
    index_as_tensor: bool,
    seed: int | None,
) -> list[Batches]:
    """Reads the batches of the first workers, as if in separate processes."""
    before = tf.compat.v1.get_seed(None)[0]
    seed = before if seed is None else seed

    def make(worker: int | tf.Tensor) -> tf.data.Dataset:
        if seed is not None:
            tf.random.set_seed(seed)
        context = tf.distribute.InputContext(num_workers, worker, 1)
        return with_context(input_fn)(context)

    @tf.function(autograph=False)
    def traced(worker: tf.Tensor) -> tf.Tensor:
        return tf.data.experimental.to_variant(make(worker))

    def read(worker: int) -> Batches:
        dataset = make(worker)
        if index_as_tensor:
            variant = traced(tf.constant(worker, tf.int64))
            spec = dataset.element_spec
            dataset = tf.data.experimental.from_variant(variant, spec)
        return _read(dataset, num_batches)

    try:
        return [read(worker) for worker in range(num_read)]
    finally:
        if seed != before:
            tf.random.set_seed(before)


def _read(dataset: tf.data.Dataset, num_batches: int | None) -> Batches:
    """Reads batches; returns the fingerprints of their examples."""
    found: Batches = []
    seen: set[int] = set()
    stale = 0
    length = int(dataset.cardinality())
    most = length if length >= 0 else _MOST_BATCHES
    for batch in dataset.take(num_batches or most):
        examples = fingerprints(batch)
        found.append(examples)
        stale += seen.issuperset(examples.tolist())
        seen.update(examples.tolist())
        if num_batches is not None or length >= 0 or not stale:
            continue
        # A finite dataset of unknown length may also contain repetitions.
        if length == tf.data.INFINITE_CARDINALITY or 2 * stale > len(found):
            break
    return found


def _all(batches: Batches) -> np.ndarray:
    return np.concatenate([np.array([], np.int64), *batches])


def _shared_by_step(one: Batches, other: Batches) -> float:
    steps = [_shared(a, b) for a, b in zip(one, other, strict=False)]
    return float(np.mean(steps)) if steps else 0.0


def _shared(one: np.ndarray, other: np.ndarray) -> float:
    """The share of the smaller array that is also in the other."""
    common = Counter(one.tolist()) & Counter(other.tolist())
    return common.total() / max(1, min(len(one), len(other)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if there is a problem, else 0."""
    parser = argparse.ArgumentParser(
        "tfdist audit",
        description="Shows what each worker would read, without a cluster.",
    )
    add = parser.add_argument
    add("--input", required=True, help="package.module:function, an input_fn")
    add("--workers", type=int, default=2)
    add("--batches", type=int, help="of each worker; default: all")
    add("--in_order", help="package.module:function: all examples, once")
    add("--index_as_tensor", action="store_true", help="as on a ps cluster")
    add("--seed", type=int, help="tf_random_seed of the RunConfig")
    args = parser.parse_args(argv)
    try:
        found = audit(
            load_function("input", args.input),
            args.workers,
            args.batches,
            in_order=args.in_order and load_function("in_order", args.in_order),
            index_as_tensor=args.index_as_tensor,
            seed=args.seed,
        )
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(found.table())
    return 1 if found.problems() else 0
