"""`python -m tfdist.audit`: see `tfdist.data.audit`."""

import sys

from tfdist.data.audit import main

if __name__ == "__main__":
    sys.exit(main())
