"""`tfdist audit`: see `tfdist.data.audit`."""

import sys

from tfdist.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["audit", *sys.argv[1:]]))
