"""Plans a placement before anything is allocated.

    python -m tfdist.placement --model=trainer.model:model_fn --ps=2,3,8

prints, for a model and clusters that do not exist yet, the bytes and the
traffic of every parameter server, the largest load over the mean, and the
distance from a lower bound that no placement can beat.

`plan` sees all variables at once, so it beats the strategies of
`tfdist.placement.strategies`, which see one after another.
"""

import argparse
import functools
import types
from collections.abc import Callable, Sequence

import numpy as np

from tfdist._tf.arguments import check_positive, load_function
from tfdist.placement import packing
from tfdist.placement.partitioners import row_slices
from tfdist.placement.plans import Piece, Plan
from tfdist.placement.strategies import (
    GreedyLoadBalancingStrategy,
    LoadFn,
    PlacementStrategy,
    RoundRobinStrategy,
    byte_size_load_fn,
    check_task,
    load_of,
    traffic_load_fn,
)
from tfdist.placement.variables import VariableSpec, describe

# Closer to the bound no more variables are split: every piece is one more
# message in every step.
_CLOSE_ENOUGH = 0.01


def plan(
    variables: Sequence[VariableSpec],
    num_ps: int,
    *,
    load_fn: LoadFn | None = None,
    split: bool | Callable[[VariableSpec], bool] = False,
    min_split_bytes: int = 256 << 10,
    memory_limits: float | Sequence[float] | None = None,
    bytes_per_string: int | None = None,
) -> Plan:
    """Plans a placement whose largest load is small.

    The largest variable left goes to the server with the smallest load; then
    moves and swaps lower the largest load. `Plan.distance` says how far the
    result is from a bound that no placement can beat. Where it is allowed,
    variables are split into `num_ps` parts, as `PartitionedEmbedding(...,
    num_shards=num_ps)` does: only the largest, as few as bring the plan within
    1 % of the bound.

    Args:
        variables: Descriptions with different names, as from `describe`.
        num_ps: Number of parameter servers, at least 1.
        load_fn: What to balance. Default: bytes held, slots included.
            `traffic_load_fn` balances the bytes that a step moves.
        split: Whether variables may be split by rows, or a callable that says
            so for each. A Keras model can split only what is a
            `PartitionedEmbedding`. Default: False.
        min_split_bytes: Smaller variables stay whole. Default: 256 KiB.
        memory_limits: Bytes that a server may hold, one number for all or one
            for each. Default: no limit.
        bytes_per_string: As in `byte_size_load_fn`.

    Returns:
        A `Plan`.

    Raises:
        TypeError: If `variables` holds something else, or a load is no number.
        ValueError: If `num_ps` is not positive, names repeat, a load is NaN or
            negative, or no placement was found that meets the memory limits.

    Example:
    >>> table = VariableSpec("table", (1_000_000, 16), num_slots=1)
    >>> dense = [VariableSpec(f"d{i}", (512, 512)) for i in range(4)]
    >>> round(plan([table, *dense], 4).imbalance, 2)
    3.87
    >>> even = plan([table, *dense], 4, split=True)
    >>> round(even.imbalance, 2), len(even.assignments["table"])
    (1.0, 4)
    """
    _check_variables(variables, num_ps)
    limits = _limits(memory_limits, num_ps)
    weights = _weights(variables, load_fn, bytes_per_string)
    loads, sizes = weights["loads"], weights["byte_loads"]
    rows = _rows(variables)
    may_split = split if callable(split) else lambda spec: bool(split)
    divisible = np.array([may_split(spec) for spec in variables], bool)
    divisible &= (rows > 1) & (sizes >= min_split_bytes)
    smallest = np.where(divisible, loads / rows, loads)
    bound = max(packing.lower_bound(smallest, num_ps), loads.sum() / num_ps)
    bounds = {
        "lower_bound": bound,
        "largest_indivisible": float(smallest.max(initial=0.0)),
    }
    # Split more and more of the largest, until the plan is close to the bound.
    largest_first = [i for i in np.argsort(-loads) if divisible[i]]
    most = len(largest_first)
    numbers = {0, most, *(1 << i for i in range(most.bit_length()))}
    plans, error = [], None
    for number in sorted(numbers):
        parts = np.ones(rows.size, int)
        split_now = largest_first[:number]
        parts[split_now] = np.minimum(rows[split_now], num_ps)
        pieces = _Pieces(rows, parts)
        try:
            tasks = packing.pack(
                pieces.share_of(loads),
                num_ps,
                sizes=pieces.share_of(sizes),
                limits=limits,
            )
        except packing.InfeasibleError as e:
            error = e
            continue
        plans.append(pieces.plan(variables, num_ps, tasks, weights, **bounds))
        if plans[-1].distance <= _CLOSE_ENOUGH:
            break
    if not plans:
        raise ValueError(
            "Argument `memory_limits` cannot be met, in bytes with slots: "
            f"{error} Received: memory_limits={memory_limits}. Use more or "
            "larger servers, or allow variables to be split."
        ) from error
    return min(plans, key=lambda found: max(found.loads))


def simulate(
    variables: Sequence[VariableSpec],
    num_ps: int,
    strategy: PlacementStrategy,
    *,
    load_fn: LoadFn | None = None,
    bytes_per_string: int | None = None,
) -> Plan:
    """Returns, as a plan, what a placement strategy would do.

    Args:
        variables: Descriptions in order of creation.
        num_ps: Number of parameter servers, at least 1.
        strategy: Callable from a `VariableSpec` to a task.
        load_fn: As in `plan`.
        bytes_per_string: As in `plan`.

    Returns:
        A `Plan` with the loads of that placement and the lower bound of all.

    Raises:
        TypeError: If the strategy returns no integer; else as `plan`.
        ValueError: If the strategy returns a task that does not exist; else as
            `plan`.

    Example:
    >>> layers = [VariableSpec(f"d{i}", (8, 8)) for i in range(3)]
    >>> simulate(layers, 2, RoundRobinStrategy(2)).byte_loads
    (512.0, 256.0)
    """
    _check_variables(variables, num_ps)
    weights = _weights(variables, load_fn, bytes_per_string)
    tasks = [
        check_task(strategy(spec), num_ps, spec, strategy) for spec in variables
    ]
    rows = _rows(variables)
    return _Pieces(rows, np.ones_like(rows)).plan(
        variables,
        num_ps,
        np.array(tasks, int),
        weights,
        lower_bound=packing.lower_bound(weights["loads"], num_ps),
        largest_indivisible=float(weights["loads"].max(initial=0.0)),
    )


class _Pieces:
    """All variables, each in equal parts; arrays with an entry for each."""

    def __init__(self, rows: np.ndarray, parts: np.ndarray) -> None:
        pieces = [
            (i, *piece)
            for i, (n, k) in enumerate(zip(rows, parts, strict=True))
            for piece in row_slices(n, k)
        ]
        self._variable, self._offset, self._rows = (
            np.array(pieces, int).reshape(-1, 3).T
        )
        self._share = self._rows / rows[self._variable]

    def share_of(self, weights: np.ndarray) -> np.ndarray:
        return weights[self._variable] * self._share

    def plan(
        self,
        variables: Sequence[VariableSpec],
        num_ps: int,
        tasks: np.ndarray,
        weights: dict[str, np.ndarray],
        **bounds: float,
    ) -> Plan:
        runs: list[list[Piece]] = [[] for _ in variables]
        columns = self._variable, self._offset, self._rows, tasks
        for i, *piece in np.stack(columns, axis=1).tolist():
            runs[i].append(Piece(*piece))

        def totals(kind: str) -> tuple[float, ...]:
            share = self.share_of(weights[kind])
            return tuple(np.bincount(tasks, share, minlength=num_ps).tolist())

        return Plan(
            variables=tuple(variables),
            num_ps=num_ps,
            assignments=types.MappingProxyType(
                {v.name: tuple(r) for v, r in zip(variables, runs, strict=True)}
            ),
            loads=totals("loads"),
            byte_loads=totals("byte_loads"),
            traffic_loads=totals("traffic_loads"),
            **bounds,
        )


def _rows(variables: Sequence[VariableSpec]) -> np.ndarray:
    return np.array([max(1, spec.num_rows) for spec in variables], int)


def _weights(
    variables: Sequence[VariableSpec],
    load_fn: LoadFn | None,
    bytes_per_string: int | None,
) -> dict[str, np.ndarray]:
    load_fn = load_fn or byte_size_load_fn
    known: dict[LoadFn, LoadFn] = {
        fn: functools.partial(fn, bytes_per_string=bytes_per_string)
        for fn in (byte_size_load_fn, traffic_load_fn)
    }
    kinds = {
        "loads": known.get(load_fn, load_fn),
        "byte_loads": known[byte_size_load_fn],
        "traffic_loads": known[traffic_load_fn],
    }
    return {
        kind: np.array([load_of(spec, fn) for spec in variables], float)
        for kind, fn in kinds.items()
    }


def _check_variables(variables: Sequence[VariableSpec], num_ps: int) -> None:
    check_positive("num_ps", num_ps)
    names = set()
    for spec in variables:
        if not isinstance(spec, VariableSpec):
            raise TypeError(
                "Argument `variables` must hold `VariableSpec`s, as "
                f"`tfdist.placement.describe` makes them. Received: {spec!r}."
            )
        if spec.name in names:
            raise ValueError(
                "Argument `variables` must have different names, since a plan "
                f"is looked up by name. Received twice: {spec.name!r}."
            )
        names.add(spec.name)


def _limits(
    memory_limits: float | Sequence[float] | None, num_ps: int
) -> np.ndarray:
    limits = np.asarray(
        np.inf if memory_limits is None else memory_limits, float
    )
    if limits.ndim == 0:
        limits = np.full(num_ps, float(limits))
    if limits.shape != (num_ps,) or not (limits > 0).all():
        raise ValueError(
            "Argument `memory_limits` must be a positive number of bytes, or "
            f"one for each of {num_ps} parameter servers. "
            f"Received: memory_limits={memory_limits}."
        )
    return limits


def rows_flag(text: str) -> tuple[str, int]:
    """The type of a flag `TABLE=ROWS`."""
    name, _, rows = text.rpartition("=")
    return name, int(rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tfdist.placement",
        description=(
            "Prints where a model's variables would live, without a cluster."
        ),
    )
    add = parser.add_argument
    add("--model", required=True, help="package.module:function, a model_fn")
    add("--ps", default="2", help="numbers of parameter servers, as 2,3,8")
    add(
        "--placement",
        default="planned",
        choices=["planned", "greedy", "round_robin"],
    )
    add("--by", default="bytes", choices=["bytes", "traffic"])
    add("--split", action="store_true", help="let large variables be split")
    add("--memory_limit_gb", type=float, help="of each server, in 10^9 bytes")
    add(
        "--rows_per_step",
        type=rows_flag,
        action="append",
        default=[],
        metavar="NAME=ROWS",
        help="unique rows a step reads of a table",
    )
    add("--plot", help="picture to write, for the last of --ps")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `python -m tfdist.placement --help`.

    Args:
        argv: Arguments. Default: those of the process.

    Returns:
        0. A bad flag, model or limit exits with 2 and a message.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    load_fn = {"bytes": byte_size_load_fn, "traffic": traffic_load_fn}[args.by]
    limit = args.memory_limit_gb and args.memory_limit_gb * 1e9
    try:
        variables = describe(
            load_function("model", args.model),
            rows_per_step=dict(args.rows_per_step),
        )
        for num_ps in map(int, args.ps.split(",")):
            if args.placement == "planned":
                shown = plan(
                    variables,
                    num_ps,
                    load_fn=load_fn,
                    split=args.split,
                    memory_limits=limit,
                )
            else:
                strategy = (
                    RoundRobinStrategy(num_ps)
                    if args.placement == "round_robin"
                    else GreedyLoadBalancingStrategy(num_ps, load_fn)
                )
                shown = simulate(variables, num_ps, strategy, load_fn=load_fn)
            print(f"{len(variables)} variables, {args.placement} by {args.by}")
            print(shown.table(), end="\n\n")
        if args.plot:
            shown.plot(args.plot)
    except (ImportError, TypeError, ValueError) as e:
        parser.error(str(e))
    return 0
