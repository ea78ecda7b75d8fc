"""`tfdist advice`: see `tfdist.advice.command`."""

import sys

from tfdist.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["advice", *sys.argv[1:]]))
