"""The message of a TensorFlow error."""

from __future__ import annotations


def summarize_error(error: BaseException) -> str:
    """The line of an error that says what happened.

    >>> text = "Graph execution error:|Detected at X|<stack traces una>|Gone."
    >>> summarize_error(ValueError(text.replace("|", chr(10))))
    'Gone.'
    """
    execution = "Graph execution error", "Detected at", "<stack traces"
    around = (*execution, " ", "\t", "Additional")
    for line in str(error).splitlines():
        if line and not line.startswith(around):
            return line
    return type(error).__name__
