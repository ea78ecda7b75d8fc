"""`python -m tfdist.advice`: see `tfdist.advice.chooser`."""

import sys

from tfdist.advice.chooser import main

if __name__ == "__main__":
    sys.exit(main())
