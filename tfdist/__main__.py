"""The commands of tfdist: `tfdist COMMAND` or `python -m tfdist COMMAND`."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from tfdist.launch.banner import without_banner

COMMANDS = {
    "launch": ("launch.command", "runs a program as every task of a cluster"),
    "resize": ("launch.resize", "gives a job other workers while it trains"),
    "advice": ("advice.command", "says which strategy suits a model, and why"),
    "plan": ("placement.planner", "shows which server would hold what"),
    "audit": ("data.audit", "shows which examples each worker would read"),
    "rehash": ("checkpoint.rehash", "gives a growing table another capacity"),
    "vertex": ("vertex.command", "writes a job file for Vertex AI"),
    "migrate": ("advice.migration", "lists what a TF 1 program must change"),
    "kubernetes": ("vertex.kubernetes", "writes a job file for Kubernetes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns its exit code, or 2 for an unknown command."""
    name, *flags = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        # A flag may name a module in the working directory, which only
        # `python -m`, not the `tfdist` script, adds to `sys.path`.
        if os.getcwd() not in sys.path:
            sys.path.insert(0, os.getcwd())
        # TensorFlow also raises the errors that its C++ log reports.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with without_banner():
            program = importlib.import_module(f"tfdist.{COMMANDS[name][0]}")
        return program.main(flags)
    lines = [f"  {command:12}{what}" for command, (_, what) in COMMANDS.items()]
    usage = "\n".join(["usage: tfdist COMMAND [flags]", "", *lines])
    if name in ("-h", "--help"):
        print(f"{usage}\n\n`tfdist COMMAND --help` lists the flags of one.")
        return 0
    print(f"{usage}\n\ntfdist: there is no command {name!r}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
