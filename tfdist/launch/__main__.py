"""`python -m tfdist.launch`: see `tfdist.launch.command`."""

import sys

from tfdist.launch.command import main

if __name__ == "__main__":
    sys.exit(main())
