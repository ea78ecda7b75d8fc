"""`tfdist vertex`: see `tfdist.vertex.command`."""

import sys

from tfdist.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["vertex", *sys.argv[1:]]))
