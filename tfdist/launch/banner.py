"""What TensorFlow prints while it is loaded, and leaving it out."""

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
"""A line that is written before TensorFlow knows `TF_CPP_MIN_LOG_LEVEL`, or the
"error" (303) that this machine has no GPU driver."""


@contextlib.contextmanager
def without_banner() -> Iterator[None]:
    """Leaves TensorFlow's banner out of what is written to stderr meanwhile.

    For the first `import tensorflow` of a program: the banner comes from C++,
    where no Python logger sees it. Everything else appears at the end.

    >>> with tfdist.launch.without_banner():
    ...     import tensorflow
    """
    if sys.stderr is None:  # Closed, as by `2>&-`: no file may get its number.
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
