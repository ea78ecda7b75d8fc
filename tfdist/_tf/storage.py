"""Differences between an object store and a disk.

`tf.io.gfile` hides most of them. TensorFlow retries a failed request to `gs://`
(no answer, HTTP 409, 429, 5xx) ten times, over about three minutes, and then
raises `AbortedError`. It does not hide that

* `makedirs` looks forever for the parent of a bucket that does not exist;
* `rmtree` considers a folder missing if its first request for it fails;
* the size of a file is cached for five seconds: a file that another process
  replaced meanwhile is truncated when read, or raises `InternalError`;
* a folder cannot be renamed atomically (`tfdist.estimator.saved_models`).
"""

from __future__ import annotations

import errno
import os
import uuid
from collections.abc import Iterator

import tensorflow as tf

_PIECE_BYTES = 1 << 20
_ATTEMPTS = 5

_ADVICE = {
    (tf.errors.PermissionDeniedError, "response code 401"): (
        "TensorFlow found no valid credentials. On Google Cloud the machine's "
        "service account is used; elsewhere run `gcloud auth "
        "application-default login`, or set GOOGLE_APPLICATION_CREDENTIALS to "
        "the path of a service account's key."
    ),
    (tf.errors.PermissionDeniedError, "response code 403"): (
        "TensorFlow's account is not allowed to do this. On the bucket, grant "
        "it the roles `roles/storage.objectUser` and, since TensorFlow checks "
        "that the bucket exists, `roles/storage.legacyBucketReader`."
    ),
    (tf.errors.NotFoundError, ""): (
        "Is there such a bucket? `gcloud storage buckets create` makes one."
    ),
    (tf.errors.FailedPreconditionError, "libcurl code"): (
        "Google Cloud Storage cannot be reached from here. In a private "
        "network of `python -m tfdist.launch` nothing can: use --network=host."
    ),
    (tf.errors.AbortedError, "retry attempts failed"): (
        "Google Cloud Storage does not answer as expected. Check the network "
        "connection and any proxy."
    ),
}

# Errors in reading that do not mean that the file is damaged.
_NO_DAMAGE = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.FailedPreconditionError,  # The store's host is not found.
    tf.errors.PermissionDeniedError,
    tf.errors.ResourceExhaustedError,
    tf.errors.UnavailableError,
)


def is_object_store(path: str) -> bool:
    """Whether `path` is in an object store, which has no folders to rename.

    >>> is_object_store("gs://bucket/job"), is_object_store("/tmp/job")
    (True, False)
    """
    return "://" in path


def absolute(path: str) -> str:
    """Returns a path that is valid from any working directory.

    >>> absolute("gs://bucket/job"), absolute("/tmp/job/")
    ('gs://bucket/job', '/tmp/job')
    """
    return path if is_object_store(path) else os.path.abspath(path)


def same_path(path: str, other: str) -> bool:
    """Whether two paths name the same file or directory.

    >>> same_path("job/", os.path.abspath("job"))
    True
    >>> same_path("gs://bucket/job", "gs://bucket/job/")
    True
    """
    one, two = (
        p.rstrip("/") if is_object_store(p) else os.path.realpath(p)
        for p in (path, other)
    )
    return one == two


def advice(path: str, error: tf.errors.OpError) -> str:
    """Advice on how to fix an error at `path`; empty if there is none.

    >>> missing = tf.errors.NotFoundError(None, None, "HTTP response code 404")
    >>> advice("gs://bucket/job", missing)
    'Is there such a bucket? `gcloud storage buckets create` makes one.'
    """
    if path.startswith("gs://"):
        for (kind, sign), text in _ADVICE.items():
            if isinstance(error, kind) and sign in error.message:
                return text
    return ""


def is_damage(error: Exception) -> bool:
    """Whether an error in reading a checkpoint means that it is damaged.

    TensorFlow raises a dozen different errors for truncated, missing or
    overwritten files, `IndexError` among them, and few for other causes.

    >>> is_damage(tf.errors.OpError(None, None, "Too many open files", 2))
    False
    """
    numbers = errno.EACCES, errno.EMFILE, errno.ENFILE, errno.ENOMEM
    texts = (os.strerror(number) in str(error) for number in numbers)
    return not (isinstance(error, _NO_DAMAGE) or any(texts))


def check_writable(directory: str, name: str = "model_dir") -> None:
    """Raises `ValueError`, about `name`, unless a directory is writable."""
    # Several tasks may check at the same time.
    probe = os.path.join(directory, f".writable-{uuid.uuid4().hex}")
    try:
        make_directory(directory)
        with tf.io.gfile.GFile(probe, "w") as file:
            file.write("")
        tf.io.gfile.remove(probe)
    except tf.errors.OpError as error:
        raise ValueError(
            f"{name} {directory!r} cannot be written: {error.message} "
            f"{advice(directory, error)}".rstrip()
        ) from error


def make_directory(path: str) -> None:
    """Creates a directory and its parents, but no bucket, if missing."""
    _check_no_tilde(path)
    if path.startswith("gs://") and not tf.io.gfile.exists(path):
        bucket = "/".join(path.split("/")[:3])
        if not tf.io.gfile.exists(bucket):
            raise tf.errors.NotFoundError(
                None, None, f"The bucket {bucket} does not exist."
            )
    tf.io.gfile.makedirs(path)


def check_no_pattern(directory: str | os.PathLike[str]) -> str:
    """Returns a path as a string; raises `ValueError` if it is a pattern.

    TensorFlow finds no checkpoint in `job[1]`, and deletes `job2`'s for `job*`.
    """
    directory = os.fspath(directory)
    if set(directory) & set("*?[\\"):
        raise ValueError(
            f"Directory {directory!r} must have no *, ?, [ or \\ in its name, "
            "which TensorFlow takes for a pattern: checkpoints in it would not "
            "be found, or others might be deleted."
        )
    _check_no_tilde(directory)
    return directory


def _check_no_tilde(directory: str) -> None:
    """Raises `ValueError` for a path that would create a folder named ~."""
    if directory.startswith("~"):
        raise ValueError(
            f"Directory {directory!r} begins with ~, which only a shell "
            "expands, and not after `--flag=`. Pass the full path, or use "
            "os.path.expanduser(...)."
        )


def names_in(directory: str) -> list[str]:
    """The files and folders in a directory; empty if it does not exist."""
    if not tf.io.gfile.isdir(directory):
        return []
    return [name.rstrip("/") for name in tf.io.gfile.listdir(directory)]


def read_text(path: str) -> str | None:
    """Reads a file that another process may replace; None if there is none.

    It does not rely on the size, which may be that of an older file.
    """
    pieces: list[bytes] = []
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            while not pieces or len(pieces[-1]) == _PIECE_BYTES:
                pieces.append(file.read(_PIECE_BYTES))
    except tf.errors.NotFoundError:
        return None
    return b"".join(pieces).decode()


def write_text(path: str, text: str) -> None:
    """Writes a file atomically: no reader sees half of it."""
    on_gs = path.startswith("gs://")  # There a file appears on close.
    temporary = path if on_gs else f"{path}.temp"
    if not on_gs:
        tf.io.gfile.makedirs(os.path.dirname(path))
    with tf.io.gfile.GFile(temporary, "w") as file:
        file.write(text)
    if not on_gs:
        tf.io.gfile.rename(temporary, path, overwrite=True)


def files_to_move(
    source: str, target: str, last: str
) -> Iterator[tuple[str, str]]:
    """Creates the folders of `source` in `target`; yields file paths in both.

    The file called `last` comes last: a reader who finds it finds all files.
    """
    found = []
    for folder, _, names in tf.io.gfile.walk(source):
        tf.io.gfile.makedirs(target + folder.removeprefix(source))
        found += [os.path.join(folder, name) for name in names]
    for path in sorted(found, key=lambda p: p.endswith(f"/{last}")):
        yield path, target + path.removeprefix(source)


def remove_tree(directory: str) -> None:
    """Removes a directory and its contents, if it exists."""
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            tf.io.gfile.rmtree(directory)
            return
        except tf.errors.NotFoundError:
            if not tf.io.gfile.exists(directory):  # TensorFlow retries this.
                return
            if attempt == _ATTEMPTS:
                raise
