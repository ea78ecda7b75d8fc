"""`python -m tfdist.placement`: see `tfdist.placement.planner`."""

import sys

from tfdist.placement.planner import main

if __name__ == "__main__":
    sys.exit(main())
