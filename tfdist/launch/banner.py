"""Suppresses the banner that TensorFlow prints when it is imported."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator

BANNER = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\)"
    rb"|I0000 00:00:[0-9.]+ +[0-9]+ [a-z_]+\.cc:[0-9]+\] "
    rb"|E0000 .*Failed call to cuInit: UNKNOWN ERROR \(303\)"
)
"""Matches lines written before TensorFlow reads `TF_CPP_MIN_LOG_LEVEL`, and the
"error" (303) that this machine has no GPU driver."""


@contextlib.contextmanager
def without_banner() -> Iterator[None]:
    """Removes TensorFlow's banner from stderr while the block runs.

    For the first `import tensorflow` of a program: the banner comes from C++,
    out of reach of Python loggers. All other output appears after the block.

    >>> with tfdist.launch.without_banner():
    ...     import tensorflow
    """
    if sys.stderr is None:  # Closed, as by `2>&-`: keep files off descriptor 2.
        while (null := os.open(os.devnull, os.O_RDWR)) < 2:
            pass
        sys.stderr = os.fdopen(null, "w")
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as written:
        os.dup2(written.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            written.seek(0)
            for line in written:
                if not BANNER.match(line):
                    os.write(2, line)
