"""Finds the files that match a pattern, and checks them before reading."""

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

# Decompression takes about a second per 100 MB.
CHECKED_GZIP_BYTES = 1 << 30
_THREADS = 16
_CHUNK = 1 << 20
_NO_TEXT = {  # By the first bytes of such files.
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
    """Returns the files that match any of the patterns, sorted, each once.

    Different names of a local file (relative, or of a link) count as one file.
    """
    if isinstance(file_pattern, str | bytes | os.PathLike):
        file_pattern = [os.fsdecode(file_pattern)]
    names: dict[str, list[str]] = {}  # The names of each file.
    for pattern in file_pattern:
        # TensorFlow would iterate over a `Path` or bytes.
        text = os.fsdecode(pattern)
        found = tf.io.gfile.glob(text)
        if text not in found and tf.io.gfile.exists(text):
            found = [text]  # A name with brackets does not match itself.
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
            "%d of the files are named more than once, %s among them, but read "
            "only once. To have examples count more, weight them, or mix "
            "datasets (tf.data.Dataset.sample_from_datasets).",
            len(again),
            min(again),
        )
    if check_gzip is not False:
        _check_gzip([path for path in paths if compression(path)], check_gzip)
    return paths


def _file(path: str) -> str:
    """Returns the canonical name of a file; raises if it is not a file."""
    local = path.removeprefix("file://")
    if "://" in local:
        return path
    if not os.path.isfile(local):
        raise ValueError(
            f"{path} is no file, but a directory, a pipe or a broken link. "
            "Name regular files, which can be read more than once: those of a "
            f"directory by a pattern, {os.path.join(path, '*')}."
        )
    return os.path.realpath(local)


def compression(path: str) -> str:
    """Returns the compression of a file, according to the end of its name.

    >>> compression("a.csv.gz"), compression("a.csv")
    ('GZIP', '')
    """
    return "GZIP" if path.endswith((".gz", ".gzip")) else ""


def check_all_text(paths: Sequence[str]) -> None:
    """Raises ValueError if any file does not look like a text file."""
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(check_text, paths))


def check_text(path: str) -> None:
    """Raises ValueError if a file does not look like a text file."""
    begins = b""
    with tf.io.gfile.GFile(path, "rb") as file:
        text = gzip.GzipFile(fileobj=file) if compression(path) else file
        # `_check_gzip` or TensorFlow reports damaged files.
        with contextlib.suppress(EOFError, gzip.BadGzipFile, zlib.error):
            begins = text.read(4096)
    for first, kind in _NO_TEXT.items():
        if begins.startswith(first):
            raise ValueError(f"{path} is no text in UTF-8, but {kind}.")
    if re.match(rb"[^\r\n]*\r+[^\r\n]", begins):
        raise ValueError(
            f"The lines of {path} end in CR, as on old Macintoshes. Write it "
            "again with LF or CRLF: TensorFlow would read it as a single line."
        )
    if b"\0" in begins.partition(b"\n")[0]:
        raise ValueError(
            f"{path} is no text in UTF-8: its first line has zero bytes. Leave "
            "the file out, or write it again as text."
        )


def _check_gzip(packed: Sequence[str], always: bool | None) -> None:
    """Decompresses files, because TensorFlow does not detect truncated ones."""
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
    """Raises ValueError if a file is incomplete; reads it once per version."""
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
