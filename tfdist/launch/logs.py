"""The files in which the tasks of a `LocalCluster` leave their output."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

_TAIL_LINES = 15


def log_name(task: str) -> str:
    """The file of a task's output."""
    return f"{task.replace(':', '-')}.log"


class Logs:
    """A folder of outputs.

    Args:
        folder: Where. Default: a temporary one, which `close` removes.
        step_pattern: Of the chief's progress lines; group 1 is the step.

    Attributes:
        folder: Where.
        is_temporary: Whether `close` removes it.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None, step_pattern: str
    ) -> None:
        self._temporary = None
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="tfdist-")
            folder = self._temporary.name
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.is_temporary = self._temporary is not None
        self._step_pattern = re.compile(step_pattern, re.MULTILINE)
        self._step: int | None = None
        self._step_offset = 0

    def read(self, task: str) -> str:
        """All that a task's processes have written; empty after `close`."""
        path = self.folder / log_name(task)
        if not path.exists():
            return ""
        return path.read_bytes().decode(errors="replace")

    def tail(self, task: str) -> list[str]:
        """The last lines of it."""
        return self.read(task).splitlines()[-_TAIL_LINES:]

    def step(self) -> int | None:
        """The step in the chief's latest progress line; None before any."""
        path = self.folder / log_name("chief:0")
        if not path.exists():
            return self._step
        with path.open("rb") as log:
            log.seek(self._step_offset)
            lines, newline, _ = log.read().rpartition(b"\n")
        self._step_offset += len(lines) + len(newline)
        text = lines.decode(errors="replace")
        for match in self._step_pattern.finditer(text):
            self._step = int(match[1])
        return self._step

    def close(self) -> None:
        """Removes the folder if it is a temporary one."""
        if self._temporary is not None:
            self._temporary.cleanup()
