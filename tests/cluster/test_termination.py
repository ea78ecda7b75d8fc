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
def handler(request):
    before = signal.signal(signal.SIGTERM, request.param)
    yield request.param
    faulthandler.unregister(signal.SIGTERM)
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_taken_back(handler):
    with termination.keeping_sigterm():
        # As TensorFlow does: a handler that is not Python's.
        faulthandler.register(signal.SIGTERM)
        assert is_caught()
    assert is_caught() == (handler != signal.SIG_DFL)
    if is_caught():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)


def test_sigterm_in_the_meantime_is_heard():
    sigterm = termination.Sigterm()
    try:
        with termination.keeping_sigterm():
            faulthandler.register(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert not sigterm.received
        assert sigterm.received
    finally:
        faulthandler.unregister(signal.SIGTERM)
        sigterm.restore()


def test_what_an_inner_one_hears_the_outer_one_does():
    """A session within a hook of another may end before it looks."""
    outer, inner = termination.Sigterm(), termination.Sigterm()
    try:
        signal.raise_signal(signal.SIGTERM)
        inner.restore()
        assert outer.received
    finally:
        outer.restore()


@pytest.mark.parametrize("first", [0, 1])
def test_two_may_end_in_any_order(first):
    before = signal.getsignal(signal.SIGTERM)
    both = [termination.Sigterm(), termination.Sigterm()]
    other = both.pop(1 - first)
    both[0].restore()
    try:
        signal.raise_signal(signal.SIGTERM)
        assert other.received
    finally:
        other.restore()
    assert signal.getsignal(signal.SIGTERM) == before
