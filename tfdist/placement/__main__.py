"""Runs `tfdist plan`; see `tfdist.placement.planner`."""

import sys

from tfdist.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
