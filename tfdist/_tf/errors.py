"""The message of a TensorFlow error."""

from __future__ import annotations

import re

_PLACE = re.compile(
    r"{{(function_)?node .*?}} |"
    r"Error in user-defined function passed to \S+ transformation "
    r"with iterator: \S+ "
)


def summarize_error(error: BaseException) -> str:
    """The line of an error that says what happened.

    >>> text = "Graph execution error:|Detected at X|<stack traces una>|Gone."
    >>> summarize_error(ValueError(text.replace("|", chr(10))))
    'Gone.'

    Of several errors, such as one per server that waited, the first counts.

    >>> text = "2 root error(s) found.|  (0) Full.|  (1) Full."
    >>> summarize_error(ValueError(text.replace("|", chr(10))))
    'Full.'

    Where in a dataset or a graph it happened is left out.

    >>> summarize_error(ValueError(
    ...     "{{function_node __wrapped__X}} Error in user-defined function "
    ...     "passed to MapDataset:3 transformation with iterator: "
    ...     "Iterator::Root::Map: a.csv, line 3: no number"))
    'a.csv, line 3: no number'
    """
    execution = "Graph execution error", "Detected at", "<stack traces"
    around = (*execution, " ", "\t", "Additional")
    count = " root error(s) found."
    for line in str(error).splitlines():
        if line.startswith("  (0) "):
            return _PLACE.sub("", line.removeprefix("  (0) "))
        if line and not line.startswith(around) and not line.endswith(count):
            return _PLACE.sub("", line)
    return type(error).__name__
