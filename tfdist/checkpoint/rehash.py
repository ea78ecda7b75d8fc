"""Changes the capacity of growing tables in a checkpoint.

    tfdist rehash --checkpoint=job --capacity=table=200000 --output=larger_job

Ids keep their rows, optimizer slots and last steps; the rest is copied.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfdist._tf import storage
from tfdist._tf.arguments import check_positive
from tfdist.checkpoint import checkpoints
from tfdist.checkpoint.names import load_variable, name_of, tables_in
from tfdist.embeddings.filling import place
from tfdist.embeddings.index import SEGMENT

# The least number of bytes that is read before it is written.
_BYTES = 1 << 30


def rehash(path: str, output: str, capacities: Mapping[str, int]) -> str:
    """Writes checkpoint `path` into directory `output`; returns its new path.

    `capacities` maps the paths of layers to their new capacities. Needs memory
    for the largest variable twice. Raises `ValueError`, and writes nothing, if
    a table does not exist, ids find no room, or `output` has checkpoints.
    """
    if checkpoints.latest(output):
        raise ValueError(f"{output!r} has checkpoints. Use another directory.")
    tables_in(path, capacities)
    moves = {name: _move(path, name, n) for name, n in capacities.items()}
    basename = os.path.basename(path)
    found = os.path.join(output, basename)
    temporary = f"{found}_temp"
    parts: list[str] = []
    values: dict[str, tf.Tensor] = {}

    def write() -> None:
        if not values:  # TensorFlow does not write empty files.
            return
        parts.append(f"{temporary}/part-{len(parts)}")
        tf.raw_ops.SaveV2(
            prefix=parts[-1],
            tensor_names=[*values],
            shape_and_slices=[""] * len(values),
            tensors=[*values.values()],
        )
        values.clear()

    storage.make_directory(temporary)
    dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    with tf.device("CPU"):
        size = 0
        for key, dtype in dtypes.items():
            [value] = tf.raw_ops.RestoreV2(
                prefix=path,
                tensor_names=[key],
                shape_and_slices=[""],
                dtypes=[dtype],
            )
            for table, moved in moves.items():
                kind = name_of(key).removeprefix(f"{table}/")
                if kind != name_of(key):
                    value = tf.constant(moved(kind, value.numpy()))
            values[key] = value
            size += dtype.size * value.shape.num_elements()
            if size > _BYTES:
                write()
                size = 0
        write()
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=found
        )
    storage.remove_tree(temporary)
    # Relative paths, like a `CheckpointManager`: `output` may be moved.
    kinds = "model_checkpoint_path", "all_model_checkpoint_paths"
    text = "".join(f'{kind}: "{basename}"\n' for kind in kinds)
    storage.write_text(os.path.join(output, "checkpoint"), text)
    return found


def _move(
    path: str, table: str, capacity: int
) -> Callable[[str, np.ndarray], np.ndarray]:
    """Returns a function that moves a table's variable to the capacity."""
    check_positive("capacity", capacity)
    keys = load_variable(path, f"{table}/keys").ravel()
    before = np.flatnonzero(keys)
    old, new = len(keys) // SEGMENT, -(-capacity // SEGMENT)
    held, after = place(keys[before], new, table)

    def moved(kind: str, value: np.ndarray) -> np.ndarray:
        if kind == "keys":
            return held
        if kind == "sketch":
            # The most of all segments an id may come from: never too low.
            counts = value.view(np.uint8)
            ends = [
                (i * old // new, -(-(i + 1) * old // new)) for i in range(new)
            ]
            most = [counts[start:end].max(axis=0) for start, end in ends]
            return np.stack(most).view(value.dtype)
        if kind == "counters":
            found = np.zeros([new, *value.shape[1:]], value.dtype)
            np.add.at(found, np.arange(old) * new // old, value)
        elif value.shape[:1] == (old * SEGMENT,):
            found = np.zeros([new * SEGMENT, *value.shape[1:]], value.dtype)
            found[after] = value[before]
        else:
            return value  # An optimizer variable for all rows together.
        return found

    return moved


def _capacity(text: str) -> tuple[str, int]:
    name, _, rows = text.rpartition("=")
    return name, int(rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns 0. Errors exit with 2 and a message."""
    parser = argparse.ArgumentParser(
        "tfdist rehash",
        description="Changes the capacity of a checkpoint's growing tables.",
    )
    add = parser.add_argument
    add("--checkpoint", required=True, help="path or prefix; or a model_dir")
    add(
        "--capacity",
        type=_capacity,
        action="append",
        required=True,
        metavar="TABLE=ROWS",
        help="new capacity of a DynamicEmbedding; can be repeated",
    )
    add("--output", required=True, help="model_dir of the job that resumes")
    args = parser.parse_args(argv)
    path = args.checkpoint
    try:
        if tf.io.gfile.isdir(path):
            path = checkpoints.latest(path) or path
        print("Wrote", rehash(path, args.output, dict(args.capacity)))
    except (TypeError, ValueError, tf.errors.OpError) as error:
        parser.error(str(error))
    return 0
