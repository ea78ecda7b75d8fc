"""`tfdist kubernetes`: see `tfdist.vertex.kubernetes`."""

import sys

from tfdist.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["kubernetes", *sys.argv[1:]]))
