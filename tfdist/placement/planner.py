"""Plans a placement before anything is allocated.

    python -m tfdist.placement --model=trainer.model:model_fn --ps=2,3,8

prints, for a model and clusters that do not exist yet, the bytes and traffic of
every parameter server, the ratio of the largest load to the mean load, and how
far the largest load is above a lower bound.
"""

import argparse
import types
from collections.abc import Callable, Sequence

import numpy as np

from tfdist._tf.arguments import check_positive, load_function
from tfdist.placement import packing, strategies
from tfdist.placement.partitioners import row_slices
from tfdist.placement.plans import Piece, Plan
from tfdist.placement.strategies import LoadFn, byte_size_load_fn, load_of
from tfdist.placement.variables import VariableSpec, describe

# Splitting stops this close to the bound, and small variables are never split:
# every additional piece costs one more message in every step.
_CLOSE_ENOUGH = 0.01
_MIN_SPLIT_BYTES = 256 << 10


def plan(
    variables: Sequence[VariableSpec],
    num_ps: int,
    *,
    load_fn: LoadFn = byte_size_load_fn,
    split: bool | Callable[[VariableSpec], bool] = False,
    memory_limits: float | Sequence[float] | None = None,
) -> Plan:
    """Plans a placement whose largest load is small.

    A strategy sees one variable at a time; a plan considers all of them at
    once. It assigns the variables, largest first, to the server with the
    smallest load, and then lowers the largest load by moves and swaps.
    `Plan.distance` is the gap to a bound that no placement can beat. If `split`
    allows it, the largest variables of at least 256 KiB are split into `num_ps`
    parts, as by `PartitionedEmbedding(..., num_shards=num_ps)`, in growing
    numbers until the plan is within 1 % of the bound.

    Args:
        variables: Descriptions with unique names, as returned by `describe`.
        num_ps: Number of parameter servers, at least 1.
        load_fn: What to balance. Default: bytes held, slots included.
            `traffic_load_fn` balances the bytes that a step moves.
        split: Whether variables may be split by rows, or a callable that
            decides for each variable. In a Keras model, only the table of a
            `PartitionedEmbedding` can be split. Default: False.
        memory_limits: Bytes of variables and slots that a server may hold, one
            number for all or one for each; it needs more, and while it makes a
            shard, twice that shard's. Default: no limit.

    Returns:
        A `Plan`.

    Raises:
        TypeError: If `variables` or a load has the wrong type.
        ValueError: If `num_ps` is not positive, names repeat, a load is NaN or
            negative, or no placement was found that meets the memory limits.

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
    loads, sizes = (
        np.array([load_of(spec, fn) for spec in variables], float)
        for fn in (load_fn, byte_size_load_fn)
    )
    rows = np.array([max(1, spec.num_rows) for spec in variables], int)
    may_split = split if callable(split) else lambda spec: split
    divisible = np.array([may_split(spec) for spec in variables], bool)
    divisible &= (rows > 1) & (sizes >= _MIN_SPLIT_BYTES)
    smallest = np.where(divisible, loads / rows, loads)
    bound = max(packing.lower_bound(smallest, num_ps), loads.sum() / num_ps)
    # Split more of the largest variables until the plan is close to the bound.
    largest_first = [i for i in np.argsort(-loads) if divisible[i]]
    most = len(largest_first)
    plans, error = [], None
    numbers = {0, most, *(1 << i for i in range(most.bit_length()))}
    for number in sorted(numbers):
        split_now, pieces = {*largest_first[:number]}, []
        for i, num_rows in enumerate(rows):
            parts = min(num_rows, num_ps) if i in split_now else 1
            pieces += [(i, *run) for run in row_slices(num_rows, parts)]
        of = [i for i, _, _ in pieces]
        share = np.array([size for _, _, size in pieces], int) / rows[of]
        try:
            tasks = packing.pack(
                loads[of] * share, num_ps, sizes[of] * share, limits
            )
        except packing.InfeasibleError as e:
            error = e
            continue
        runs: list[list[Piece]] = [[] for _ in variables]
        for (i, offset, size), task in zip(pieces, tasks.tolist(), strict=True):
            runs[i].append(Piece(offset, size, task))
        plans.append(_plan(variables, num_ps, runs, load_fn, bound, smallest))
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
    strategy: strategies.PlacementStrategy,
    *,
    load_fn: LoadFn = byte_size_load_fn,
) -> Plan:
    """Returns the placement that a strategy would choose, as a `Plan`.

    Args:
        variables: Descriptions in order of creation.
        num_ps: As in `plan`.
        strategy: Callable that maps a `VariableSpec` to a task.
        load_fn: As in `plan`.

    Raises:
        TypeError, ValueError: As in `plan`, or if a returned task is invalid.

    >>> from tfdist.placement import RoundRobinStrategy
    >>> layers = [VariableSpec(f"d{i}", (8, 8)) for i in range(3)]
    >>> simulate(layers, 2, RoundRobinStrategy(2)).byte_loads
    (512.0, 256.0)
    """
    _check_variables(variables, num_ps)
    runs = []
    for spec in variables:
        task = strategies.check_task(strategy(spec), num_ps, spec, strategy)
        runs.append([Piece(0, max(1, spec.num_rows), task)])
    loads = np.array([load_of(spec, load_fn) for spec in variables], float)
    bound = packing.lower_bound(loads, num_ps)
    return _plan(variables, num_ps, runs, load_fn, bound, loads)


def _plan(
    variables: Sequence[VariableSpec],
    num_ps: int,
    runs: Sequence[Sequence[Piece]],
    load_fn: LoadFn,
    bound: float,
    smallest: np.ndarray,
) -> Plan:
    names = [spec.name for spec in variables]
    return Plan(
        tuple(variables),
        num_ps,
        types.MappingProxyType(dict(zip(names, map(tuple, runs), strict=True))),
        load_fn,
        lower_bound=bound,
        largest_indivisible=float(smallest.max(initial=0.0)),
    )


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
    given = np.inf if memory_limits is None else memory_limits
    limits = np.asarray(given, float)
    if limits.ndim == 0:
        limits = np.full(num_ps, limits)
    if limits.shape != (num_ps,) or not (limits > 0).all():
        raise ValueError(
            "Argument `memory_limits` must be a positive number of bytes, or "
            f"one for each of {num_ps} parameter servers. "
            f"Received: memory_limits={memory_limits}."
        )
    return limits


def _rows_flag(text: str) -> tuple[str, int]:
    name, _, rows = text.rpartition("=")
    return name, int(rows)


def _parser() -> argparse.ArgumentParser:
    what = "Prints where a model's variables would live, without a cluster."
    parser = argparse.ArgumentParser("tfdist plan", description=what)
    add = parser.add_argument
    add("--model", required=True, help="package.module:function, a model_fn")
    add("--ps", default="2", help="numbers of parameter servers, as 2,3,8")
    add("--by", default="bytes", choices=["bytes", "traffic"])
    add("--split", action="store_true", help="let large variables be split")
    add("--memory_limit_gb", type=float, help="of each server, in 10^9 bytes")
    add(
        "--rows_per_step",
        type=_rows_flag,
        action="append",
        default=[],
        metavar="NAME=ROWS",
        help="unique rows a step reads of a table",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `python -m tfdist.placement --help`.

    Returns 0. A bad flag, model or limit exits with 2 and a message.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    by_traffic = args.by == "traffic"
    load_fn = strategies.traffic_load_fn if by_traffic else byte_size_load_fn
    limit = args.memory_limit_gb and args.memory_limit_gb * 1e9
    try:
        model_fn = load_function("model", args.model)
        rows_per_step = dict(args.rows_per_step)
        variables = describe(model_fn, rows_per_step=rows_per_step)
        for num_ps in map(int, args.ps.split(",")):
            planned = plan(
                variables,
                num_ps,
                load_fn=load_fn,
                split=args.split,
                memory_limits=limit,
            )
            print(f"{len(variables)} variables, planned by {args.by}")
            print(planned.table(), end="\n\n")
    except (TypeError, ValueError) as e:
        parser.error(str(e))
    return 0
