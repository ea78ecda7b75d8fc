"""Prints where a model's variables would live, without a cluster.

    python -m tfdist.placement --model=trainer.model:model_fn --ps=2,3,8

prints, for each number of parameter servers, the bytes and the traffic of
every one, the largest load over the mean, and the distance from a lower bound
that no placement can beat.
"""

import argparse
import sys
from collections.abc import Sequence

from tfdist._tf.arguments import load_function
from tfdist.placement.planner import plan, rows_flag, simulate
from tfdist.placement.strategies import (
    GreedyLoadBalancingStrategy,
    RoundRobinStrategy,
    byte_size_load_fn,
    traffic_load_fn,
)
from tfdist.placement.variables import describe


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tfdist.placement", description=__doc__.splitlines()[0]
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


if __name__ == "__main__":
    sys.exit(main())
