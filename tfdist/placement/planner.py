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
import importlib
import numbers
from collections.abc import Callable, Sequence

import numpy as np

from tfdist.placement import packing, splitting
from tfdist.placement.plans import Plan, make_plan
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

# A placement this close to the bound is not split: every piece more is a
# message more in every step.
_SLACK = 0.01


def plan(
    variables: Sequence[VariableSpec],
    num_ps: int,
    *,
    load_fn: LoadFn | None = None,
    split: bool | Callable[[VariableSpec], bool] = False,
    split_axis: int | None = 0,
    min_split_bytes: int = 256 << 10,
    memory_limits: float | Sequence[float] | None = None,
    bytes_per_string: int | None = None,
) -> Plan:
    """Plans a placement whose largest load is small.

    Variables are packed largest first, improved by moves, swaps and re-dealing
    two servers, and proven best by search where they are few. Where it is
    allowed, large variables are cut into runs of rows that fill the servers
    up; they stay whole where that is within 1 % of the bound.

    Args:
        variables: Descriptions with different names, as from `describe`.
        num_ps: Number of parameter servers, at least 1.
        load_fn: What to balance. Defaults to `None`: bytes held, slots
            included. `traffic_load_fn` balances the bytes a step moves.
        split: Whether variables may be cut by rows, or a callable that says so
            for each. Defaults to `False`. A Keras 3 model can cut only what is
            a `PartitionedEmbedding`.
        split_axis: Axis to cut. Defaults to 0, rows, the only one that
            `PartitionedEmbedding` and `ParameterServerStrategy` cut. `None`
            cuts each variable along its longest axis, as a TF1 partitioned
            variable could be; a convolution's kernel has few rows.
        min_split_bytes: Smaller variables stay whole. Defaults to 256 KiB.
        memory_limits: Bytes that a server may hold, one number for all or one
            for each. Defaults to `None`, no limit.
        bytes_per_string: As in `byte_size_load_fn`.

    Returns:
        A `Plan`.

    Raises:
        TypeError: If `variables` holds something else, or a load is no number.
        ValueError: If `num_ps` is not positive, names repeat, a load is NaN or
            negative, or no placement meets the memory limits.

    Example:
    >>> table = VariableSpec("table", (1_000_000, 16), num_slots=1)
    >>> dense = [VariableSpec(f"d{i}", (512, 512)) for i in range(4)]
    >>> round(plan([table, *dense], 4).imbalance, 2)
    3.87
    >>> halved = plan([table, *dense], 4, split=True)
    >>> round(halved.imbalance, 2), len(halved.assignments["table"])
    (1.0, 4)
    """
    _check_variables(variables, num_ps)
    limits = _check_limits(memory_limits, num_ps)
    weights = _weights(variables, load_fn, bytes_per_string)
    loads, sizes = weights["loads"], weights["byte_loads"]
    axes = [_axis(spec, split_axis) for spec in variables]
    rows = np.array(
        [
            max(1, s.shape[axis]) if s.shape else 1
            for s, axis in zip(variables, axes, strict=True)
        ],
        int,
    )
    may_split = split if callable(split) else lambda spec: bool(split)
    cut = np.array([may_split(spec) for spec in variables], bool)
    cut &= (rows > 1) & (sizes >= min_split_bytes)
    whole_loads = np.where(cut, loads / rows, loads)
    try:
        runs, bound = _pack(loads, sizes, rows, cut, whole_loads, limits)
    except packing.InfeasibleError as e:
        raise ValueError(
            "Argument `memory_limits` cannot be met, in bytes with slots: "
            f"{e} Received: memory_limits={memory_limits}. Use more or larger "
            "servers, or allow variables to be split."
        ) from e
    return make_plan(
        variables,
        runs,
        axes=axes,
        weights=weights,
        num_ps=num_ps,
        lower_bound=bound,
        largest_indivisible=float(whole_loads.max(initial=0.0)),
    )


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
    return make_plan(
        variables,
        [{t: s.num_rows or 1} for t, s in zip(tasks, variables, strict=True)],
        axes=[0] * len(variables),
        weights=weights,
        num_ps=num_ps,
        lower_bound=packing.pack(weights["loads"], num_ps).lower_bound,
        largest_indivisible=float(weights["loads"].max(initial=0.0)),
    )


def _pack(
    loads: np.ndarray,
    sizes: np.ndarray,
    rows: np.ndarray,
    cut: np.ndarray,
    whole_loads: np.ndarray,
    limits: np.ndarray,
) -> tuple[list[dict[int, int]], float]:
    """Returns rows by task for each variable, and the lower bound."""
    bound = max(
        loads.sum() / limits.size, packing.lower_bound(whole_loads, limits.size)
    )
    try:
        packed = packing.pack(loads, limits.size, sizes=sizes, limits=limits)
    except packing.InfeasibleError:
        if not cut.any():
            raise
        packed = None
    if not cut.any():
        bound = packed.lower_bound
    elif packed is None or max(packed.loads) > bound * (1 + _SLACK):
        return splitting.fill(loads, sizes, rows, cut, limits, bound), bound
    return [
        {task: int(n)} for task, n in zip(packed.bins, rows, strict=True)
    ], bound


def _axis(spec: VariableSpec, split_axis: int | None) -> int:
    if split_axis is None:
        return int(np.argmax(spec.shape)) if spec.shape else 0
    if not isinstance(split_axis, numbers.Integral) or split_axis < 0:
        raise ValueError(
            "Argument `split_axis` must be an axis, from 0 on, or None for the "
            f"longest. Received: split_axis={split_axis!r}."
        )
    return int(split_axis) if split_axis < len(spec.shape) else 0


def _weights(
    variables: Sequence[VariableSpec],
    load_fn: LoadFn | None,
    bytes_per_string: int | None,
) -> dict[str, np.ndarray]:
    known = {
        fn: functools.partial(fn, bytes_per_string=bytes_per_string)
        for fn in (byte_size_load_fn, traffic_load_fn)
    }
    load_fn = known.get(load_fn or byte_size_load_fn, load_fn)
    kinds = {
        "loads": load_fn,
        "byte_loads": known[byte_size_load_fn],
        "traffic_loads": known[traffic_load_fn],
    }
    return {
        kind: np.array([load_of(spec, fn) for spec in variables], float)
        for kind, fn in kinds.items()
    }


def _check_variables(variables: Sequence[VariableSpec], num_ps: int) -> None:
    if not isinstance(num_ps, numbers.Integral) or num_ps < 1:
        raise ValueError(
            "Argument `num_ps` must be a positive integer. "
            f"Received: num_ps={num_ps!r}."
        )
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


def _check_limits(
    memory_limits: float | Sequence[float] | None, num_ps: int
) -> np.ndarray:
    if memory_limits is None:
        return np.full(num_ps, np.inf)
    limits = np.asarray(memory_limits, float)
    if limits.ndim == 0:
        limits = np.full(num_ps, float(limits))
    if limits.shape != (num_ps,) or not (limits > 0).all():
        raise ValueError(
            "Argument `memory_limits` must be a positive number of bytes, or "
            f"one for each of {num_ps} parameter servers. "
            f"Received: memory_limits={memory_limits}."
        )
    return limits


def _load_model_fn(target: str) -> Callable:
    module, _, function = target.partition(":")
    if not module or not function:
        raise ValueError(
            "Flag --model must be package.module:function. "
            f"Received: --model={target}."
        )
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise ValueError(
            f"Flag --model must name a function. Received: --model={target}, "
            f"but: {e}"
        ) from e


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
        argv: Arguments. Defaults to those of the process.

    Returns:
        0. A bad flag, model or limit exits with 2 and a message.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    load_fn = {"bytes": byte_size_load_fn, "traffic": traffic_load_fn}[args.by]
    limit = args.memory_limit_gb and args.memory_limit_gb * 1e9
    try:
        variables = describe(
            _load_model_fn(args.model), rows_per_step=dict(args.rows_per_step)
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
