"""The message of a TensorFlow error."""

from __future__ import annotations


def summarize_error(error: BaseException) -> str:
    """The line of an error that says what happened.

    >>> text = "Graph execution error:|Detected at X|  File y|Gone."
    >>> summarize_error(ValueError(text.replace("|", chr(10))))
    'Gone.'
    """
    around = ("Graph execution error", "Detected at", " ", "\t", "Additional")
    lines = [
        line
        for line in str(error).splitlines()
        if line and not line.startswith(around)
    ]
    return lines[0] if lines else type(error).__name__
