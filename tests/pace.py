"""Marks slow cases: README's test command skips them, `.ci/run` does not."""

import pytest


def slow(*cases):
    """Marks parametrized cases, each a value or a tuple of values, as slow."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else [case]),
            marks=pytest.mark.slow,
        )
        for case in cases
    ]


def slow_but(fast, cases):
    """Marks all `cases` as slow except those in `fast`."""
    cases = list(cases)
    assert set(fast) <= set(cases)
    return [param for c in cases for param in ([c] if c in fast else slow(c))]
