"""The exercises of the course: hints, and what makes an answer right.

`lesson_04.py` holds those of lesson 4: `EXERCISES`, from number to `Exercise`.
None of these files says an answer: a value is compared by its digest, and what
can be right in several ways by the properties that it must have. The answers
are in `solutions/`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import json
import math
import numbers
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

WORDS = 25
"""An answer to an open question has at least so many."""


@dataclasses.dataclass(frozen=True)
class Exercise:
    """What there is to say of an answer, and how to judge it.

    With neither `digest` nor `is_right` it is an open question: any text of at
    least `WORDS` words is taken, and compared with the model answer by hand.

    Attributes:
        hints: for the first wrong answer and for the second; the first says
            where to look, the second how to get there.
        digest: of the right answer, by `digest_of`; None where there is none.
        is_right: called with an answer, and by name with what the notebook
            gives to `course.check`; None where there is none. If both are
            given, both must agree.
    """

    hints: tuple[str, str]
    digest: str | None = None
    is_right: Callable[..., bool] | None = None

    @property
    def is_open(self) -> bool:
        """Whether it is an open question."""
        return self.digest is None and self.is_right is None


def find(name: str) -> Exercise:
    """The exercise "4.2", the second of lesson 4.

    Raises:
        LookupError: There is none.
    """
    lesson, _, number = name.partition(".")
    try:
        module = importlib.import_module(f"exercises.lesson_{int(lesson):02}")
        return module.EXERCISES[int(number)]
    except (ImportError, KeyError, ValueError) as error:
        raise LookupError(f"There is no exercise {name!r}.") from error


def judge(name: str, answer: Any, **given: Any) -> bool:
    """Whether an answer to the exercise `name` is right.

    Args:
        name: such as "4.2".
        answer: anything.
        given: what only the notebook has, for `Exercise.is_right`.

    Raises:
        Exception: what `is_right` raises.
        LookupError: There is no such exercise.
    """
    exercise = find(name)
    if exercise.is_open:
        return isinstance(answer, str) and len(answer.split()) >= WORDS
    if exercise.digest and exercise.digest != digest_of(name, answer):
        return False
    return exercise.is_right is None or bool(exercise.is_right(answer, **given))


def digest_of(name: str, answer: Any) -> str:
    """What stands for an answer to the exercise `name` in its file.

    >>> digest_of("4.2", 0.25) == digest_of("4.2", 1 / 4)
    True
    >>> digest_of("4.2", 0.25) == digest_of("4.3", 0.25)
    False

    Raises:
        TypeError: as `canonical`.
    """
    text = f"tfdist course, exercise {name}: {canonical(answer)}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def canonical(answer: Any) -> str:
    """The same text for all answers that mean the same.

    Numbers that are not whole are rounded to three digits; case and spaces of
    text do not count, nor does the order of a set or of a dict's keys; a tuple
    and an array of NumPy or TensorFlow are lists.

    >>> canonical({"b": (1, 2.0), "a": 2 / 3})
    '{"a": 0.667, "b": [1, 2]}'
    >>> canonical(" Worker  1")
    '"worker 1"'

    Raises:
        TypeError: An answer of this type has none.
    """
    return json.dumps(_plain(answer), sort_keys=True)


def _plain(answer: Any) -> Any:
    if hasattr(answer, "numpy"):
        answer = answer.numpy()
    if hasattr(answer, "tolist"):
        answer = answer.tolist()
    if answer is None or isinstance(answer, bool | int):
        return answer
    if isinstance(answer, numbers.Real):
        return _rounded(float(answer))
    if isinstance(answer, bytes):
        answer = answer.decode()
    if isinstance(answer, str):
        return " ".join(answer.casefold().split())
    if isinstance(answer, Mapping):
        return {str(_plain(k)): _plain(v) for k, v in answer.items()}
    if isinstance(answer, Set):
        return sorted((_plain(part) for part in answer), key=json.dumps)
    if isinstance(answer, Sequence):
        return [_plain(part) for part in answer]
    kind = type(answer).__name__
    raise TypeError(f"a number, a text, a list or a dict is needed, no {kind}")


def _rounded(value: float) -> float | int:
    if not math.isfinite(value):
        return value
    if math.isclose(value, round(value), rel_tol=1e-9, abs_tol=1e-9):
        return round(value)
    return float(f"{value:.3g}")
