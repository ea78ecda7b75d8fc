"""Which strategy to choose, and why.

    python -m tfdist.advice --model=package.module:model_fn --machines=8

prints an estimate of every way to distribute a model, the advised one, and the
reasons:

* many weak or unreliable machines: parameter servers;
* fast devices with strong links: all-reduce;
* a model too large for a device: partition it;
* input-bound: more machines.

`choose_strategy` decides from plain numbers; nothing is connected or allocated.
"""

from __future__ import annotations

import argparse
import dataclasses
import pkgutil
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import keras

from tfdist.advice.cost_model import Estimate, estimates
from tfdist.advice.machines import KINDS, Machines
from tfdist.advice.reasons import (
    bytes_text,
    reasons_for,
    reasons_for_none,
    secs_text,
)
from tfdist.advice.workload import Workload, measure
from tfdist.placement.planner import rows_flag

# A simpler way may give this much less than the best.
_WORTH = 0.9
_WIDTH = 79
_PREEMPTIBLE_HOURS = 24.0


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """What to do, why, and what else was considered.

    Attributes:
        strategy: For `RunConfig(strategy=...)`, or `"model_parallel"`; None if
            nothing is possible.
        reasons: Sentences, the most important first.
        estimates: Of all ways, as `tfdist.advice.estimates` returns them.
        workload: What was asked about.
        machines: What was asked about.
    """

    strategy: str | None
    reasons: tuple[str, ...]
    estimates: tuple[Estimate, ...]
    workload: Workload
    machines: Machines

    @property
    def estimate(self) -> Estimate | None:
        """The estimate of the advised strategy."""
        return {e.strategy: e for e in self.estimates}.get(self.strategy)

    def table(self) -> str:
        """Returns estimates and reasons as text of at most 79 columns."""
        seconds = ("compute", "input", "wait", "wire", "step")
        columns = "".join(f"{name:>8}" for name in seconds)
        return "\n".join(
            [
                *map(_wrapped, _facts(self.workload, self.machines)),
                "",
                f"{'':23}{'n':>5}{columns}{'examples/s':>11}",
                *(_row(e, e is self.estimate) for e in self.estimates),
                "",
                f"Advice: {self.strategy or 'none is possible'}",
                *(_wrapped(f"- {reason}") for reason in self.reasons),
            ]
        )


def choose_strategy(workload: Workload, machines: Machines) -> Recommendation:
    """Advises a strategy.

    The one with the most examples a second, failures counted, or a simpler one
    with at least 90 % of that. Layers are spread over devices only where no
    device holds a copy and parameter servers cannot help.

    Args:
        workload: What a step of one replica needs.
        machines: What there is.

    Returns:
        A `Recommendation`.

    Example:
    >>> resnet = Workload(batch_size=64, dense_bytes=102e6, flops=1.5e12)
    >>> choose_strategy(resnet, Machines(kind="gpu", devices=8)).strategy
    'mirrored'
    >>> spot = Machines(count=100, secs_between_failures=86400)
    >>> choose_strategy(resnet, spot).strategy
    'ps'
    """
    made = estimates(workload, machines)
    chosen = _best(made)
    if chosen is None:
        reasons = reasons_for_none(made, workload)
        return Recommendation(None, reasons, made, workload, machines)
    others = {e.strategy: e for e in made}
    reasons = reasons_for(chosen, others, workload, machines)
    return Recommendation(chosen.strategy, reasons, made, workload, machines)


def _best(made: Sequence[Estimate]) -> Estimate | None:
    """The first, hence simplest, that is nearly as fast as the fastest."""
    possible = [e for e in made if e.feasible]
    data_parallel = [e for e in possible if e.strategy != "model_parallel"]
    candidates = data_parallel or possible
    if not candidates:
        return None
    enough = _WORTH * max(e.examples_per_sec for e in candidates)
    return next(e for e in candidates if e.examples_per_sec >= enough)


def _facts(step: Workload, machines: Machines) -> list[str]:
    lines = [
        f"{machines.count} x {machines.devices} {machines.kind} of "
        f"{bytes_text(machines.device_memory)}, "
        f"{machines.bandwidth * 8 / 1e9:.3g} Gbit/s and "
        f"{secs_text(machines.latency)} between machines",
        f"{step.batch_size:,} examples a replica, dense "
        f"{bytes_text(step.dense_bytes)}",
    ]
    if step.table_bytes:
        lines[1] += (
            f", tables {bytes_text(step.table_bytes)}, "
            f"{bytes_text(step.rows_bytes)} of rows a step"
        )
    return lines


def _row(estimate: Estimate, advised: bool) -> str:
    name = f"{'>' if advised else ' '} {estimate.strategy}"
    if estimate.num_ps:
        name += f" ({estimate.num_ps:,} server{'s' * (estimate.num_ps > 1)})"
    if not estimate.feasible:
        return f"{name:26}{estimate.why_not}"
    parts = (
        estimate.compute_secs,
        estimate.input_secs,
        estimate.wait_secs,
        estimate.wire_secs,
        estimate.secs_per_step,
    )
    seconds = "".join(f"{secs_text(part):>8}" for part in parts)
    rate = estimate.examples_per_sec
    rate = f"{rate:,.0f}" if 100 <= rate < 1e8 else f"{rate:.3g}"
    return f"{name:23}{estimate.replicas:>5}{seconds}{rate:>11}"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, _WIDTH, subsequent_indent="  ")


def _model_fn(target: str) -> Callable[[], keras.Model]:
    try:
        if ":" not in target:
            raise ValueError("it must be package.module:function.")
        return pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as e:
        raise ValueError(
            "Flag --model must name a function that can be imported. "
            f"Received: --model={target}, but: {e}"
        ) from e


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tfdist.advice",
        description="Prints which strategy to choose for a model, and why.",
    )
    add = parser.add_argument_group("the model").add_argument
    add("--model", help="package.module:function, a model_fn")
    add(
        "--rows_per_step",
        type=rows_flag,
        action="append",
        metavar="TABLE=ROWS",
        help="different rows of one of its tables that a step reads",
    )
    add("--measure", action="store_true", help="time a step on this machine")
    add = parser.add_argument_group("or, without --model").add_argument
    add("--dense_mb", type=float, help="weights read whole, in 10^6 bytes")
    add("--table_mb", type=float, help="tables looked up by row")
    add("--rows_mb", type=float, help="rows of them that a step reads")
    add("--slots", type=float, help="of the optimizer, a weight; default 2")
    add = parser.add_argument_group("its step").add_argument
    add("--batch_size", type=int, default=256, help="examples of one replica")
    add("--compute_secs", type=float, help="of a step on one device")
    add("--input_secs", type=float, default=0, help="to prepare a batch")
    add = parser.add_argument_group("the machines").add_argument
    add("--machines", type=int, default=1)
    add("--devices_per_machine", type=int, default=1)
    add("--device", default="cpu", choices=KINDS)
    add("--device_gflops", type=float, help="that a device attains")
    add("--device_memory_gb", type=float, help="in 10^9 bytes")
    add("--host_memory_gb", type=float, help="of a parameter server")
    add("--link_gbps", type=float, default=10, help="between machines, Gbit/s")
    add("--link_latency_us", type=float, default=100)
    add("--device_link_gbps", type=float, help="between a machine's devices")
    add(
        "--reliable",
        choices=["yes", "no"],
        default="yes",
        help="no: preemptible, each machine is lost once a day",
    )
    add("--hours_between_failures", type=float, help="of one machine")
    add("--spread", type=float, help="deviation of step times over their mean")
    return parser


def _workload(args: argparse.Namespace) -> Workload:
    numbers = ("dense_mb", "table_mb", "rows_mb", "slots")
    told = [f"--{name}" for name in numbers if getattr(args, name) is not None]
    if args.model and told:
        raise ValueError(
            f"--model tells what {' and '.join(told)} would. Leave one out."
        )
    if args.model:
        return _of_model(args)
    if args.dense_mb is None:
        raise ValueError("Give --model, or --dense_mb and other numbers.")
    if args.measure or args.rows_per_step:
        raise ValueError("--measure and --rows_per_step need --model.")
    dense, table, rows = (
        1e6 * (number or 0.0)
        for number in (args.dense_mb, args.table_mb, args.rows_mb)
    )
    slots = 2.0 if args.slots is None else args.slots
    return Workload(
        batch_size=args.batch_size,
        dense_bytes=dense,
        table_bytes=table,
        rows_bytes=rows,
        slot_bytes=slots * (dense + table),
        compute_secs=args.compute_secs,
        input_secs=args.input_secs,
    )


def _of_model(args: argparse.Namespace) -> Workload:
    model_fn = _model_fn(args.model)
    step = Workload.of(
        model_fn, args.batch_size, rows_per_step=dict(args.rows_per_step or ())
    )
    compute_secs = args.compute_secs
    if args.measure:
        if compute_secs is not None:
            raise ValueError("--measure tells --compute_secs. Leave one out.")
        measured = measure(model_fn, args.batch_size)
        compute_secs = measured.compute_secs
        print(
            f"Measured here: a step {secs_text(compute_secs)}, "
            f"a matrix product {measured.flops / 1e9:.3g} GFLOP/s."
        )
    return dataclasses.replace(
        step, compute_secs=compute_secs, input_secs=args.input_secs
    )


def _machines(args: argparse.Namespace) -> Machines:
    hours = args.hours_between_failures
    if hours is None and args.reliable == "no":
        hours = _PREEMPTIBLE_HOURS
    given: dict[str, Any] = {
        "device_flops": _scaled(args.device_gflops, 1e9),
        "device_memory": _scaled(args.device_memory_gb, 1e9),
        "device_bandwidth": _scaled(args.device_link_gbps, 1e9 / 8),
        "host_memory": _scaled(args.host_memory_gb, 1e9),
        "spread": args.spread,
        "secs_between_failures": _scaled(hours, 3600.0),
    }
    return Machines(
        count=args.machines,
        devices=args.devices_per_machine,
        kind=args.device,
        bandwidth=args.link_gbps * 1e9 / 8,
        latency=args.link_latency_us * 1e-6,
        **{name: value for name, value in given.items() if value is not None},
    )


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `python -m tfdist.advice --help`.

    Args:
        argv: Arguments. Defaults to those of the process.

    Returns:
        0; 1 if no strategy is possible. A bad flag or model exits with 2 and a
        message.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        machines = _machines(args)
        advice = choose_strategy(_workload(args), machines)
    except (TypeError, ValueError) as e:
        parser.error(str(e))
    print(advice.table())
    return 0 if advice.strategy else 1
