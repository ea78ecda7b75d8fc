"""Where an input is, and which: what a checkpoint holds of an iterator.

TensorFlow restores a position in whatever dataset has the same kinds of ops:
batches that were buffered are the other one's, and then as much of the new one
is skipped as was read of that. So the two datasets are compared.

Private names of TensorFlow, as in `private`.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

# What a checkpoint writes and reads for one variable.
from tensorflow.python.training.saving import saveable_object

from tfdist._tf import storage
from tfdist._tf.private import UninitializedVariable

_STATE, _DATASET = "ITERATOR_STATE", "DATASET"
# Attributes of a dataset's ops that differ where a program runs again.
_DIFFER = "seed", "seed2", "metadata", "shared_name"
_IGNORE = 1  # What a dataset refers to, as the state of a table.
# A number that a function is given is a seed if it is that large.
LEAST_SEED = 1 << 48
_MOST_FILES, _MOST_BYTES = 8, 4096


class OtherDatasetError(ValueError):
    """The position was saved of another dataset."""


class HeldPosition(UninitializedVariable):
    """What a checkpoint saves in place of an iterator: where it was."""

    def __init__(self, iterator: Any) -> None:
        super().__init__(False, dtype=tf.variant, shape=tf.TensorShape(None))
        self._iterator = iterator
        self._digest = _digest(iterator)

    def hold(self) -> None:
        """Takes the position of now, or raises what saving it would."""
        (state,) = self._iterator._serialize_to_tensors().values()
        self.assign(state, read_value=False)

    def release(self) -> None:
        """Gives its memory back: it may hold a buffer of examples."""
        self.assign(tf.raw_ops.OptionalNone(), read_value=False)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def digest() -> tf.Tensor:
            return tf.constant(self._digest)

        def saved(value: Any, dtype: tf.DType, name: str) -> Any:
            spec = saveable_object.SaveSpec(value, "", name, dtype, self.device)
            return saveable_object.SaveableObject(self, [spec], name)

        return {
            _STATE: lambda name: saved(self.read_value, tf.variant, name),
            _DATASET: lambda name: saved(digest, tf.string, name),
        }


def restore_position(iterator: Any, path: str) -> bool:
    """Has an iterator go on where a checkpoint says; False: it says nothing.

    Raises:
        OtherDatasetError: It was another dataset; the iterator begins again.
    """
    keys = [f"iterator/.ATTRIBUTES/{name}" for name in (_STATE, _DATASET)]
    # Those of earlier versions have no digest.
    found = {key for key, _ in tf.train.list_variables(path)} & {*keys}
    if keys[0] not in found:
        return False
    state, *digest = tf.raw_ops.RestoreV2(
        prefix=path,
        tensor_names=keys[: len(found)],
        shape_and_slices=[""] * len(found),
        dtypes=[tf.variant, tf.string][: len(found)],
    )
    own = _digest(iterator).encode()
    if any(each.numpy() != own for each in digest):
        raise OtherDatasetError("Its files, constants or functions differ.")
    try:
        iterator._restore_from_tensors({"_STATE": state})
    except tf.errors.OpError as error:
        # What is left of it has no batch, or fails.
        tf.raw_ops.MakeIterator(
            dataset=iterator._dataset._variant_tensor,
            iterator=iterator._iterator_resource,
        )
        raise OtherDatasetError(error.message.partition("\n")[0]) from error
    return True


def _digest(iterator: Any) -> str:
    """Of its dataset; taken once, since that may hold large arrays."""
    if not hasattr(iterator, "_tfdist_digest"):
        iterator._tfdist_digest = digest_of(iterator._dataset)
    return iterator._tfdist_digest


def digest_of(dataset: tf.data.Dataset) -> str:
    """What tells a dataset from another one: its ops, functions and constants.

    Not its random seeds, nor the int64 scalars from `LEAST_SEED` on that its
    functions are given, which are taken for seeds. Of its first files what they
    begin with, so that a file may grow. It is the same in each process;
    `tf.raw_ops.DatasetFingerprint` is not, where a function has several side
    effects.

    >>> ranges = [tf.data.Dataset.range(n) for n in (1, 1, 2)]
    >>> first, same, other = map(digest_of, ranges)
    >>> first == same != other
    True
    """
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=_IGNORE,
        strip_device_assignment=True,
    )
    graph = tf.compat.v1.GraphDef.FromString(serialized.numpy())
    functions = {f.signature.name: f for f in graph.library.function}
    met: list[str] = []  # Functions that are called.
    texts: list[bytes] = []  # Paths of files among them.
    digest = hashlib.sha256()

    def add(nodes: Iterable[Any], names: Collection[str]) -> None:
        # Names have numbers of the process; here, others, as they are met.
        numbers: dict[str, int] = {}

        def number(quoted: re.Match[str]) -> str:
            control, name, output = quoted.groups()
            if name in functions:
                if name not in met:
                    met.append(name)
                return f"function {met.index(name)}"
            if name in names:
                place = numbers.setdefault(name, len(numbers))
                return f"{control}{place}{output}"
            return quoted[0]

        for node in nodes:
            for name in [*node.attr]:
                if name in _DIFFER or name.startswith("_"):
                    node.attr.pop(name)
            if node.op == "Const":
                value = node.attr["value"].tensor
                texts.extend(value.string_val[:_MOST_FILES])
                # An array may be large; as text it would be thrice that.
                digest.update(value.tensor_content)
                value.ClearField("tensor_content")
                value.ClearField("resource_handle_val")
            node.ClearField("experimental_debug_info")
            text = re.sub('"(\\^?)([^":]*)([^"]*)"', number, str(node))
            digest.update(text.encode())

    add(_without_seeds(graph.node), [node.name for node in graph.node])
    for name in met:  # Which grows by the functions that a function calls.
        own = functions[name]
        arguments = [each.name for each in own.signature.input_arg]
        nodes = [node.name for node in own.node_def]
        add(_without_seeds(own.node_def), {*arguments, *nodes})
    beginnings = filter(None, map(_beginning, dict.fromkeys(texts)))
    for beginning in itertools.islice(beginnings, _MOST_FILES):
        digest.update(beginning)
    return digest.hexdigest()


def _beginning(path: bytes) -> bytes:
    """Of a file that may be read again; of what is none, nothing."""
    name = os.fsdecode(path)
    if storage.is_object_store(name) or os.path.isfile(name):
        file = tf.io.gfile.GFile(name, "rb")
        with contextlib.suppress(tf.errors.OpError), file:
            return file.read(_MOST_BYTES)
    return b""


def _without_seeds(nodes: Sequence[Any]) -> Iterator[Any]:
    """Nodes, but for those from which an op takes what may be its seeds."""
    numbers = {node.name for node in nodes if _is_large(node)}
    seeds = set()
    for node in nodes:
        op = getattr(tf.raw_ops, node.op, None)
        arguments = [*inspect.signature(op).parameters] if op else []
        # In a function an output has two more names.
        inputs = [name.partition(":")[0] for name in node.input]
        if any(name.endswith("other_arguments") for name in arguments):
            seeds |= numbers.intersection(inputs)
        else:
            pairs = zip(arguments, inputs, strict=False)
            seeds |= {name for argument, name in pairs if argument in _DIFFER}
    return (node for node in nodes if node.name not in seeds)


def _is_large(node: Any) -> bool:
    value = node.attr["value"].tensor
    is_number = value.dtype == tf.int64.as_datatype_enum
    if not is_number or value.tensor_shape.dim:
        return False
    return abs(tf.make_ndarray(value)) >= LEAST_SEED
