"""Who hears SIGTERM."""

import faulthandler
import re
import signal
from pathlib import Path

import pytest

from tfdist.cluster import termination


def is_caught():
    """Whether the system runs a handler, whatever Python thinks."""
    status = Path("/proc/self/status").read_text()
    caught = int(re.search(r"SigCgt:\s+(\w+)", status)[1], 16)
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.fixture(params=[signal.SIG_DFL, signal.default_int_handler])
def bypassed(request):
    """A handler that is not Python's any more, as TensorFlow makes it."""
    before = signal.signal(signal.SIGTERM, request.param)
    faulthandler.register(signal.SIGTERM)
    yield request.param
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_taken_back(bypassed):
    assert is_caught()
    termination.take_sigterm_back()
    assert is_caught() == (bypassed != signal.SIG_DFL)
    if is_caught():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
