"""The command line `python -m tfdist.advice`.

    python -m tfdist.advice --model=package.module:model_fn --machines=8

prints an estimate of every way to distribute a model, the advised one, and why.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist._tf.arguments import load_function
from tfdist.advice.chooser import choose_strategy, secs_text
from tfdist.advice.machines import KINDS, Machines
from tfdist.advice.measurement import measure
from tfdist.advice.workload import Workload
from tfdist.placement.planner import rows_flag

_PREEMPTIBLE_HOURS = 24.0
# Flag: the field of `Workload` or `Machines`, its unit, what it is.
_MODEL = {
    "dense_mb": ("dense_bytes", 1e6, "weights read whole, in 10^6 bytes"),
    "table_mb": ("table_bytes", 1e6, "tables looked up by row"),
    "rows_mb": ("rows_bytes", 1e6, "rows of them that a step reads"),
}
_MACHINES = {
    "device_gflops": ("device_flops", 1e9, "that a device attains"),
    "device_memory_gb": ("device_memory", 1e9, "in 10^9 bytes"),
    "host_memory_gb": ("host_memory", 1e9, "of a parameter server"),
    "link_gbps": ("bandwidth", 1e9 / 8, "between machines, Gbit/s (10)"),
    "link_latency_us": ("latency", 1e-6, "between machines (100)"),
    "device_link_gbps": (
        *("device_bandwidth", 1e9 / 8, "between a machine's devices"),
    ),
    "hours_between_failures": (
        *("secs_between_failures", 3600.0, "of one machine"),
    ),
    "spread": ("spread", 1.0, "deviation of step times over their mean"),
}


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
    for flag, (_, _, text) in _MODEL.items():
        add(f"--{flag}", type=float, help=text)
    add("--slots", type=float, help="of the optimizer, a weight (2)")
    add = parser.add_argument_group("its step").add_argument
    add("--batch_size", type=int, default=256, help="examples a replica (256)")
    add("--compute_secs", type=float, help="of a step on one device")
    add("--input_secs", type=float, default=0, help="to prepare a batch")
    add = parser.add_argument_group("the machines").add_argument
    add("--machines", type=int, default=1)
    add("--devices_per_machine", type=int, default=1)
    add("--device", default="cpu", choices=KINDS)
    for flag, (_, _, text) in _MACHINES.items():
        add(f"--{flag}", type=float, help=text)
    text = "no: preemptible, each machine is lost once a day"
    add("--reliable", choices=["yes", "no"], default="yes", help=text)
    return parser


def _fields(
    args: argparse.Namespace, flags: dict[str, tuple[str, float, str]]
) -> dict[str, float]:
    """Those fields whose flags were given, in bytes and seconds."""
    return {
        field: getattr(args, flag) * unit
        for flag, (field, unit, _) in flags.items()
        if getattr(args, flag) is not None
    }


def _workload(args: argparse.Namespace) -> Workload:
    given = [f for f in (*_MODEL, "slots") if getattr(args, f) is not None]
    secs = {"compute_secs": args.compute_secs, "input_secs": args.input_secs}
    if not args.model:
        if args.dense_mb is None:
            raise ValueError("Give --model, or --dense_mb and other numbers.")
        if args.measure or args.rows_per_step:
            raise ValueError("--measure and --rows_per_step need --model.")
        sizes = _fields(args, _MODEL)
        slots = 2.0 if args.slots is None else args.slots
        slots *= sizes["dense_bytes"] + sizes.get("table_bytes", 0.0)
        return Workload(
            batch_size=args.batch_size, slot_bytes=slots, **sizes, **secs
        )
    if given:
        flags = " and ".join(f"--{flag}" for flag in given)
        raise ValueError(f"--model tells what {flags} would. Leave one out.")
    if args.measure and args.compute_secs is not None:
        raise ValueError("--measure tells --compute_secs. Leave one out.")
    model_fn: Any = load_function("model", args.model)
    rows = dict(args.rows_per_step or ())
    step = Workload.of(model_fn, args.batch_size, rows_per_step=rows)
    if args.measure:
        secs["compute_secs"] = measure(model_fn, args.batch_size)
        print(f"Measured here: a step {secs_text(secs['compute_secs'])}.")
    return dataclasses.replace(step, **secs)


def _machines(args: argparse.Namespace) -> Machines:
    if args.hours_between_failures is None and args.reliable == "no":
        args.hours_between_failures = _PREEMPTIBLE_HOURS
    return Machines(
        count=args.machines,
        devices=args.devices_per_machine,
        kind=args.device,
        **_fields(args, _MACHINES),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `python -m tfdist.advice --help`.

    Args:
        argv: Arguments. Default: those of the process.

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
