"""The files that a pattern names, checked before anything is read from them."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gzip
import logging
import os
import re
import zlib
from collections.abc import Sequence

import tensorflow as tf

_log = logging.getLogger(__name__)

# Decompressing takes a second for about 100 MB.
CHECKED_GZIP_BYTES = 1 << 30
_THREADS = 16
_CHUNK = 1 << 20
_NO_TEXT = {  # By how such files begin.
    b"PK\x03\x04": "a zip archive or an Excel sheet",
    b"PAR1": "a Parquet file",
    b"\x1f\x8b": "compressed by gzip; its name must end in .gz",
    b"BZh": "compressed by bzip2",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\xff\xfe": "in UTF-16",
    b"\xfe\xff": "in UTF-16",
}


def match(
    file_pattern: str | Sequence[str], check_gzip: bool | None = False
) -> list[str]:
    """The files that match one of the patterns, sorted, each once.

    A local file has many names (relative, of a link), and is still one.
    """
    if isinstance(file_pattern, str | bytes | os.PathLike):
        file_pattern = [os.fsdecode(file_pattern)]
    names: dict[str, list[str]] = {}  # Of each file.
    for pattern in file_pattern:
        # TensorFlow would iterate over a `Path` or bytes.
        text = os.fsdecode(pattern)
        found = tf.io.gfile.glob(text)
        if text not in found and tf.io.gfile.exists(text):
            found = [text]  # It has a bracket: as a pattern, others match.
        if not found:
            raise FileNotFoundError(
                f"No file matches {text!r}. Expected the path of a file, or a "
                "pattern (*, ?, [...]) that some file matches."
            )
        for path in sorted(found):
            names.setdefault(_file(path), []).append(path)
    if not names:
        raise ValueError(
            "Argument `file_pattern` must be a path, a pattern, or several. "
            f"Received: file_pattern={file_pattern!r}."
        )
    paths = sorted(first for first, *_ in names.values())
    if again := {path for _, *more in names.values() for path in more}:
        _log.warning(
            "%d of the files are named more than once, %s among them, and read "
            "once all the same. To have examples count more, weigh them, or "
            "mix data sets (tf.data.Dataset.sample_from_datasets).",
            len(again),
            min(again),
        )
    if check_gzip is not False:
        _check_gzip([path for path in paths if compression(path)], check_gzip)
    return paths


def _file(path: str) -> str:
    """What is the same for all names of a file; checks that it is one."""
    local = path.removeprefix("file://")
    if "://" in local:
        return path
    if not os.path.isfile(local):
        raise ValueError(
            f"{path} is no file, but a directory, a pipe or a link to nothing. "
            "Name files, which are read more than once: those of a directory "
            f"by a pattern, {os.path.join(path, '*')}."
        )
    return os.path.realpath(local)


def compression(path: str) -> str:
    """How a file is compressed, by the end of its name.

    >>> compression("a.csv.gz"), compression("a.csv")
    ('GZIP', '')
    """
    return "GZIP" if path.endswith((".gz", ".gzip")) else ""


def check_all_text(paths: Sequence[str]) -> None:
    """Raises ValueError if one of the files begins like one that is none."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(check_text, paths))


def check_text(path: str) -> None:
    """Raises ValueError if a file begins like one that is no text."""
    begins = b""
    with tf.io.gfile.GFile(path, "rb") as file:
        text = gzip.GzipFile(fileobj=file) if compression(path) else file
        # That it is damaged `_check_gzip` or TensorFlow says.
        with contextlib.suppress(EOFError, gzip.BadGzipFile, zlib.error):
            begins = text.read(4096)
    for first, kind in _NO_TEXT.items():
        if begins.startswith(first):
            raise ValueError(f"{path} is no text in UTF-8, but {kind}.")
    if re.match(rb"[^\r\n]*\r+[^\r\n]", begins):
        raise ValueError(
            f"The lines of {path} end in CR, as of old Macintoshes. Write it "
            "again with LF or CRLF: TensorFlow would take it for one line."
        )
    if b"\0" in begins.partition(b"\n")[0]:
        raise ValueError(
            f"{path} is no text in UTF-8: its first line has zero bytes. Leave "
            "it out, or write it again as text."
        )


def _check_gzip(packed: Sequence[str], always: bool | None) -> None:
    """Decompresses files, as TensorFlow does not notice if one is truncated."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        stats = list(pool.map(tf.io.gfile.stat, packed))
        size = sum(stat.length for stat in stats)
        if not always and size > CHECKED_GZIP_BYTES:
            _log.warning(
                "%d gzip files of %.1f GB are not checked before training: "
                "TensorFlow would not notice if one was truncated. Check them "
                "with `gzip -t`, or give check_gzip=True.",
                len(packed),
                size / 1e9,
            )
            return
        versions = [(stat.length, stat.mtime_nsec) for stat in stats]
        list(pool.map(_check_whole, packed, versions))


@functools.lru_cache(maxsize=10_000)
def _check_whole(path: str, version: tuple[int, int]) -> None:
    """Raises ValueError for a file that is not; reads it once per version."""
    del version
    size = 0
    try:
        # An empty file is accepted.
        with tf.io.gfile.GFile(path, "rb") as file, gzip.open(file) as text:
            while chunk := text.read(_CHUNK):
                size += len(chunk)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(
            f"{path} is not a complete gzip file: after {size} bytes of text, "
            f"{error}. Write it again, or rename it if it is not compressed."
        ) from error
