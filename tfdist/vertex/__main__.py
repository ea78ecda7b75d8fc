"""`python -m tfdist.vertex`: see `tfdist.vertex.command`."""

import sys

from tfdist.vertex.command import main

if __name__ == "__main__":
    sys.exit(main())
