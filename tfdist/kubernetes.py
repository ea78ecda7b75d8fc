"""`python -m tfdist.kubernetes`: see `tfdist.vertex.kubernetes`."""

import sys

from tfdist.vertex.kubernetes import main

if __name__ == "__main__":
    sys.exit(main())
