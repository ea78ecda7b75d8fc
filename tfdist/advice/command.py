"""The command line `python -m tfdist.advice`.

    python -m tfdist.advice --model=package.module:model_fn --machines=8
    python -m tfdist.advice --dense_bytes=1e8 --kind=gpu --devices=4

print an estimate for every strategy, the recommended strategy, and the reasons.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from tfdist._tf.arguments import load_function
from tfdist.advice.chooser import SECS, choose_strategy, in_units
from tfdist.advice.machines import Machines
from tfdist.advice.workload import Workload, measure


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "tfdist advice",
        description=(
            "Prints which strategy to choose for a model, and why. The flags "
            "without a help text are fields of `tfdist.advice.Workload` and "
            "`tfdist.advice.Machines`, described there: numbers in bytes, "
            "seconds and examples. They override --model and the defaults."
        ),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--model", help="a model function, as package.module:function")
    add("--measure", action="store_true", help="time a step on this machine")
    add("--machines", dest="count", type=int, help="the same as --count")
    types = {"int": int, "str": str}
    for record in (Workload, Machines):
        for field in dataclasses.fields(record):
            add(f"--{field.name}", type=types.get(str(field.type), float))
    return parser


def _workload(model: str, measured: bool, fields: dict[str, Any]) -> Workload:
    batch_size = int(fields.setdefault("batch_size", 256))
    if not model:
        if measured or "dense_bytes" not in fields:
            raise ValueError("Pass --model, or --dense_bytes and no --measure.")
        return Workload(**fields)
    if measured and "compute_secs" in fields:
        raise ValueError("--measure sets --compute_secs: pass only one.")
    model_fn = load_function("model", model)
    step = Workload.of(model_fn, batch_size)
    if measured:
        secs = fields["compute_secs"] = measure(model_fn, batch_size)
        print(f"Measured here: a step {in_units(secs, SECS)}.")
    return dataclasses.replace(step, **fields)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if no strategy is feasible, else 0."""
    parser = _parser()
    args = vars(parser.parse_args(argv))
    model, measured = args.pop("model", ""), args.pop("measure", False)
    names = {field.name for field in dataclasses.fields(Machines)}
    try:
        machines = Machines(**{n: args.pop(n) for n in names & args.keys()})
        advice = choose_strategy(_workload(model, measured, args), machines)
    except (LookupError, TypeError, ValueError) as e:
        parser.error(str(e))
    print(advice.table())
    return 0 if advice.strategy else 1
