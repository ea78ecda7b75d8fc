"""`tfdist launch`: see `tfdist.launch.command`."""

import sys

from tfdist.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
