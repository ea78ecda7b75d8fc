"""`python -m tfdist.advice`: see `tfdist.advice.command`."""

import sys

from tfdist.advice.command import main

if __name__ == "__main__":
    sys.exit(main())
