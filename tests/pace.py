"""Which cases of a test README's command runs; `.ci/run` runs them all."""

import pytest


def slow(*cases):
    """Cases, each a value or a tuple of them, that are slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]),
            marks=pytest.mark.slow,
        )
        for case in cases
    ]


def slow_but(fast, cases):
    """`cases`, of which all are slow that are not among the `fast`."""
    cases = list(cases)
    assert set(fast) <= set(cases)
    return [param for c in cases for param in ([c] if c in fast else slow(c))]
