"""Do workers read different examples? Asked without a cluster.

    python -m tfdist.audit --workers=4 --input=package.module:input_fn

runs the pipeline of each of four workers in this process and prints how many
examples two of them share, at the same step and in a whole pass, which ones
nobody reads, and how well they are shuffled. "Even with a well-shuffled data
set on disk, if all your workers are loading straight from it, they will be
seeing the same batch at the same time and produce the same gradients": that is
a row of 100 % here, and exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import hashlib
import importlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfdist.data.input_fns import InputFn, described, with_context

# Workers that share more than this at the same step are one worker twice.
MOST_SHARED = 0.5
# What is read without end is read until a batch brings nothing new, or so far.
_MOST_BATCHES = 10_000

Batches = list[np.ndarray]  # An int64 for each example of each batch.


@dataclasses.dataclass(frozen=True)
class Audit:
    """What several workers read.

    Examples are the same if all their features and labels are, or their `key`.

    Attributes:
        input_fn: the name of the input function.
        batches: for each worker, its batches: a number for each example.
        known: all examples there are, in order if `in_order`.
        in_order: whether `known` has the order of the files.
    """

    input_fn: str
    batches: tuple[Batches, ...]
    known: np.ndarray
    in_order: bool

    @property
    def at_the_same_step(self) -> np.ndarray:
        """Share of a batch that another worker reads at the same step.

        `(workers, workers)`, the mean over the steps that both make.
        """
        return self._pairs(_shared_by_step)

    @property
    def in_all(self) -> np.ndarray:
        """Share of the examples of a worker that another reads as well.

        `(workers, workers)`, of the one that reads fewer.
        """
        return self._pairs(
            lambda a, b: _shared(np.unique(_all(a)), np.unique(_all(b)))
        )

    @property
    def repeated(self) -> int:
        """Examples that two workers read in their first pass, or one twice.

        A pass is as many examples of each worker as it takes for all to be
        read once; equal examples count as one.
        """
        share = len(self.known) // len(self.batches)
        first = np.concatenate([_all(each)[:share] for each in self.batches])
        return len(first) - len(np.unique(first))

    @property
    def alone(self) -> np.ndarray:
        """Share of all examples that a worker reads in the end; `(workers,)`.

        1 where every pass deals the examples again: then what a dead worker
        held, others read.
        """
        return np.array(
            [np.isin(self.known, _all(each)).mean() for each in self.batches]
        )

    @property
    def unread(self) -> np.ndarray:
        """Places in `known` of the examples that no worker reads."""
        read = np.concatenate([_all(batches) for batches in self.batches])
        return np.flatnonzero(~np.isin(self.known, read))

    @property
    def spread(self) -> list[float]:
        """How far apart in the files consecutive examples are, by worker.

        0 if they are neighbours, as in the order of the files; 1 if they are
        as far apart as in a random order. NaN if the order of the files is not
        known.
        """
        spreads = []
        for places in self.places():
            # Among the examples that the worker reads: others have the rest.
            own, ranks = np.unique(places, return_inverse=True)
            if not self.in_order or len(own) < 3:
                spreads.append(float("nan"))
                continue
            # The mean distance of two of n in a random order is (n + 1) / 3.
            by_chance = (len(own) + 1) / 3
            distance = np.abs(np.diff(ranks)).mean()
            spreads.append(float((distance - 1) / (by_chance - 1)))
        return spreads

    def places(self) -> list[np.ndarray]:
        """For each worker, the place in `known` of each example it reads."""
        order = np.argsort(self.known, kind="stable")
        places = []
        for batches in self.batches:
            read = _all(batches)
            at = np.searchsorted(self.known, read, sorter=order)
            at = order[np.minimum(at, len(order) - 1)]
            places.append(at[self.known[at] == read])
        return places

    def problems(self) -> list[str]:
        """What is wrong, a sentence each; nothing if all is well."""
        found = []
        worst = _worst_pair(self.at_the_same_step)
        if worst and worst[2] >= MOST_SHARED:
            found.append(_same_examples(self.input_fn, *worst))
        if len(self.unread):
            found.append(
                f"Nobody reads {len(self.unread)} of {len(self.known)} "
                f"examples{self._which(self.unread)}."
            )
        low = [i for i, spread in enumerate(self.spread) if spread < 0.1]
        if low:
            found.append(
                f"Worker {', '.join(map(str, low))} reads in the order of the "
                "files: a batch holds what lies together there. Shuffle."
            )
        return found

    def table(self) -> str:
        """All of it, as text."""
        lines = [
            f"{len(self.batches)} workers of input function {self.input_fn}",
            "",
            "worker   batches  examples  distinct  shuffled",
        ]
        for i, batches in enumerate(self.batches):
            read = _all(batches)
            spread = self.spread[i]
            shown = "?" if np.isnan(spread) else f"{min(spread, 1):.0%}"
            lines.append(
                f"{i:>6} {len(batches):>9} {len(read):>9} "
                f"{len(np.unique(read)):>9} {shown:>9}"
            )
        for title, shares in (
            ("shared at the same step", self.at_the_same_step),
            ("shared in all that was read", self.in_all),
        ):
            lines += ["", title, _matrix(shares)]
        lines += [
            "",
            f"read by nobody: {len(self.unread)} of "
            f"{len(self.known)}{self._which(self.unread)}",
            f"read twice in the first pass: {self.repeated}",
            "share of all examples that a worker reads in the end: "
            + ", ".join(f"{share:.0%}" for share in self.alone),
        ]
        problems = self.problems()
        return "\n".join(lines + [f"problem: {p}" for p in problems])

    def plot(self, path: str) -> None:
        """Draws it: who shares with whom, and when each example is read.

        Args:
            path: of a picture of a kind that Matplotlib writes.

        Raises:
            ImportError: Matplotlib, which tfdist does not need, is missing.
        """
        from matplotlib.figure import Figure

        figure = Figure((13, 4), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.6])
        for axes, shares, title in (
            (left, self.at_the_same_step, "Shared at the same step"),
            (middle, self.in_all, "Shared in all that was read"),
        ):
            axes.imshow(shares, vmin=0, vmax=1, cmap="Reds")
            for (row, other), share in np.ndenumerate(shares):
                text = "" if row == other else f"{share:.0%}"
                color = "white" if share > 0.6 else "black"
                axes.text(other, row, text, ha="center", va="center", c=color)
            axes.set(title=title, xlabel="worker", ylabel="worker")
            axes.set_xticks(range(len(shares)))
            axes.set_yticks(range(len(shares)))
        for i, places in enumerate(self.places()):
            right.plot(places, ".", markersize=2, label=f"worker {i}")
        order = "the files" if self.in_order else "a single worker"
        right.set(
            title=f"{len(self.unread)} of {len(self.known)} read by nobody",
            xlabel="examples read",
            ylabel=f"place in the order of {order}",
        )
        right.legend(loc="upper right", markerscale=5)
        figure.savefig(path)

    def _pairs(self, share: Callable[[Batches, Batches], float]) -> np.ndarray:
        shares = np.eye(len(self.batches))
        for i, j in itertools.combinations(range(len(self.batches)), 2):
            shares[i, j] = shares[j, i] = share(
                self.batches[i], self.batches[j]
            )
        return shares

    def _which(self, places: np.ndarray) -> str:
        """Where in the files, if that is known: " (places 3-7, 9)"."""
        if not self.in_order or not len(places):
            return ""
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        shown = [
            f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}"
            for run in runs[:5]
        ]
        more = ", ..." if len(runs) > 5 else ""
        return f" (places {', '.join(shown)}{more})"


def audit(
    input_fn: InputFn,
    num_workers: int,
    num_batches: int | None = None,
    *,
    in_order: InputFn | None = None,
    key: str | None = None,
    index_as_tensor: bool = False,
    seed: int | None = None,
) -> Audit:
    """Runs the pipeline of each worker, and compares what they read.

    Without a cluster, one after another, in this process: what
    `tfdist.Estimator` would let each of its workers read.

    Args:
        input_fn: as of a `TrainSpec`.
        num_workers: how many there would be.
        num_batches: to read from each. Default: all of a finite dataset; of an
            endless one, until a batch brings nothing new, 10,000 at most.
        in_order: an input function that gives every example once, in the order
            of the files, so that it is known how well they are shuffled.
            Default: what a single worker reads tells which examples there are.
        key: the feature that tells one example from another. Default: all
            features and labels together do.
        index_as_tensor: whether the function is traced once for all workers,
            with the worker's index a tensor, as under a parameter-server
            strategy, or called for each, as under all others.
        seed: `tf_random_seed` of the RunConfig, which `tf.random.set_seed` gets
            in each process. Default: what it has in this one.

    Returns:
        An `Audit`: `print(audit(...).table())`.

    Raises:
        ValueError: a number is not positive, `key` is no feature, or the
            dataset has no batches.
    """
    for name, value in (
        ("num_workers", num_workers),
        ("num_batches", num_batches),
    ):
        if value is not None and value < 1:
            raise ValueError(
                f"Argument `{name}` must be positive. Received: {name}={value}."
            )
    with _seeded(seed) as set_seed:
        found = []
        for dataset in _datasets(
            input_fn, num_workers, range(num_workers), index_as_tensor, set_seed
        ):
            found.append(_read(dataset, num_batches, key))
        set_seed()
        if in_order is not None:
            known = _read(with_context(in_order)(_context(1, 0)), None, key)
        else:
            known = _read(with_context(input_fn)(_context(1, 0)), None, key)
    return Audit(
        described(input_fn),
        tuple(found),
        _first_of_each(_all(known)),
        in_order is not None,
    )


def check_workers_differ(
    input_fn: InputFn,
    num_workers: int,
    *,
    index_as_tensor: bool = False,
    seed: int | None = None,
) -> str | None:
    """A cheap look at whether the first two workers read the same examples.

    It reads two batches of each.

    Args:
        input_fn: as of a `TrainSpec`.
        num_workers: how many there are.
        index_as_tensor: as in `audit`.
        seed: as in `audit`.

    Returns:
        A warning that names the function and says what to do; None if they
        differ, and for a single worker.
    """
    if num_workers < 2:
        return None
    with _seeded(seed) as set_seed:
        first, second = (
            _read(dataset, 2, None)
            for dataset in _datasets(
                input_fn, num_workers, (0, 1), index_as_tensor, set_seed
            )
        )
    # Examples that are all alike do not tell whose they are.
    if not first or not second or len(np.unique(_all(first))) < 2:
        return None
    shared = _shared_by_step(first, second)
    if shared < MOST_SHARED:
        return None
    return _same_examples(described(input_fn), 0, 1, shared)


def _same_examples(input_fn: str, one: int, other: int, share: float) -> str:
    return (
        f"Workers {one} and {other} read the same examples at the same step "
        f"({share:.0%} of a batch), so they compute the same gradients. They "
        f"come from input function {input_fn}. Let it take the InputContext "
        "that it gets and use `dataset.shard(context.num_input_pipelines, "
        "context.input_pipeline_id)`, or `tfdist.read_csv(..., "
        "context=context)` and its like."
    )


def _context(workers: int, worker: int) -> tf.distribute.InputContext:
    return tf.distribute.InputContext(workers, worker, 1)


@contextlib.contextmanager
def _seeded(seed: int | None) -> Iterator[Callable[[], None]]:
    """Gives what sets TensorFlow's seed as it is in a fresh process."""
    before = tf.compat.v1.get_seed(None)[0]
    wanted = before if seed is None else seed

    def set_seed() -> None:
        if wanted is not None:
            tf.random.set_seed(wanted)

    try:
        yield set_seed
    finally:
        if seed is not None:
            tf.random.set_seed(before)


def _datasets(
    input_fn: InputFn,
    num_workers: int,
    workers: Sequence[int],
    index_as_tensor: bool,
    set_seed: Callable[[], None],
) -> Iterator[tf.data.Dataset]:
    """The dataset of each worker, made as in a process of its own."""
    call = with_context(input_fn)
    if not index_as_tensor:
        for worker in workers:
            set_seed()
            yield call(_context(num_workers, worker))
        return
    set_seed()
    spec = call(_context(num_workers, 0)).element_spec
    set_seed()
    traced = tf.function(
        lambda worker: tf.data.experimental.to_variant(
            call(_context(num_workers, worker))
        ),
        autograph=False,
    )
    for worker in workers:
        variant = traced(tf.constant(worker, tf.int64))
        yield tf.data.experimental.from_variant(variant, spec)


def _read(
    dataset: tf.data.Dataset, num_batches: int | None, key: str | None
) -> Batches:
    """The examples of each batch."""
    found, seen, stale = [], set(), 0
    length = int(dataset.cardinality())
    for batch in dataset.take(num_batches or _MOST_BATCHES):
        examples = fingerprints(batch, key)
        found.append(examples)
        stale += seen.issuperset(examples.tolist())
        seen.update(examples.tolist())
        if num_batches is not None or length >= 0 or not stale:
            continue
        # Of unknown length: an endless one repeats itself, a finite one may.
        if length == tf.data.INFINITE_CARDINALITY or 2 * stale > len(found):
            break
    return found


def fingerprints(batch: Any, key: str | None = None) -> np.ndarray:
    """A number for each example of a batch; equal examples have equal ones.

    Args:
        batch: a structure of tensors, also sparse or ragged ones, whose first
            dimension is the batch.
        key: the feature that alone tells one example from another.

    Returns:
        int64 `(batch,)`.

    Raises:
        ValueError: there is no such feature, or a tensor without a batch.
    """
    if key is not None:
        features = batch[0] if isinstance(batch, tuple) else batch
        if not isinstance(features, dict) or key not in features:
            names = sorted(features) if isinstance(features, dict) else "none"
            raise ValueError(
                f"Argument `key` must name a feature: {names}. "
                f"Received: key={key!r}."
            )
        batch = features[key]
    columns = [_rows(tensor) for tensor in tf.nest.flatten(batch)]
    digests = b"".join(
        hashlib.blake2b(b"".join(parts), digest_size=8).digest()
        for parts in zip(*columns, strict=True)
    )
    return np.frombuffer(digests, np.int64)


def _rows(tensor: Any) -> list[bytes]:
    """The bytes of each example in a tensor."""
    if isinstance(tensor, tf.RaggedTensor):
        return [repr(row.tolist()).encode() for row in tensor.numpy()]
    if isinstance(tensor, tf.SparseTensor):
        indices, values = tensor.indices.numpy(), tensor.values.numpy()
        ends = np.searchsorted(
            indices[:, 0], np.arange(1, tensor.dense_shape[0])
        )
        return [
            repr((i[:, 1:].tolist(), v.tolist())).encode()
            for i, v in zip(
                np.split(indices, ends), np.split(values, ends), strict=True
            )
        ]
    if not tensor.shape.rank:
        raise ValueError(
            "The dataset must give batches: tensors whose first dimension is "
            f"the batch. Received: {tensor!r}. Use `dataset.batch(...)`."
        )
    values = tensor.numpy().reshape(len(tensor), -1)
    if tensor.dtype == tf.string:
        return [repr(row).encode() for row in values.tolist()]
    return [row.tobytes() for row in np.ascontiguousarray(values)]


def _all(batches: Batches) -> np.ndarray:
    return np.concatenate([np.array([], np.int64), *batches])


def _first_of_each(examples: np.ndarray) -> np.ndarray:
    """Each example once, where it is first."""
    return examples[np.sort(np.unique(examples, return_index=True)[1])]


def _shared_by_step(one: Batches, other: Batches) -> float:
    steps = [_shared(a, b) for a, b in zip(one, other, strict=False)]
    return float(np.mean(steps)) if steps else 0.0


def _shared(one: np.ndarray, other: np.ndarray) -> float:
    """Share of the smaller one that is in the other, too."""
    common = collections.Counter(one.tolist()) & collections.Counter(
        other.tolist()
    )
    return common.total() / max(1, min(len(one), len(other)))


def _worst_pair(shares: np.ndarray) -> tuple[int, int, float] | None:
    """The two workers that share most; None if there is only one."""
    pairs = itertools.combinations(range(len(shares)), 2)
    found = [(i, j, float(shares[i, j])) for i, j in pairs]
    return max(found, key=lambda pair: pair[2], default=None)


def _matrix(shares: np.ndarray) -> str:
    numbers = range(len(shares))
    lines = ["worker" + "".join(f"{other:>7}" for other in numbers)]
    for i in numbers:
        cells = ("-" if i == j else f"{shares[i, j]:.0%}" for j in numbers)
        lines.append(f"{i:>6}" + "".join(f"{cell:>7}" for cell in cells))
    return "\n".join(lines)


def _load(flag: str, target: str | None) -> InputFn | None:
    if target is None:
        return None
    module, _, function = target.partition(":")
    try:
        if not function:
            raise ValueError("no function is named")
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"Flag --{flag} must be package.module:function. "
            f"Received: --{flag}={target} ({error})."
        ) from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tfdist.audit",
        description="Shows what each worker would read, without a cluster.",
    )
    add = parser.add_argument
    add("--input", required=True, help="package.module:function, an input_fn")
    add("--workers", type=int, default=2)
    add("--batches", type=int, help="of each worker; all if omitted")
    add("--in_order", help="package.module:function: all examples, once")
    add("--key", help="feature that tells one example from another")
    add(
        "--index_as_tensor",
        action="store_true",
        help="as under a parameter-server strategy",
    )
    add("--seed", type=int, help="tf_random_seed of the RunConfig")
    add("--plot", help="picture to write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `python -m tfdist.audit --help`.

    Args:
        argv: Arguments. Defaults to those of the process.

    Returns:
        0 if all is well, 1 if there is a problem. A bad flag exits with 2.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        found = audit(
            _load("input", args.input),
            args.workers,
            args.batches,
            in_order=_load("in_order", args.in_order),
            key=args.key,
            index_as_tensor=args.index_as_tensor,
            seed=args.seed,
        )
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    print(found.table())
    if args.plot:
        found.plot(args.plot)
    return 1 if found.problems() else 0
