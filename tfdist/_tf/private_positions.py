"""The position and identity of an input, which a checkpoint stores.

TensorFlow restores a position in any dataset with the same kinds of ops. It
would restore buffers of the saved dataset, and skip as many elements of the new
one as were read from that. Therefore the two datasets are compared.

This uses private names of TensorFlow; see `private`.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import logging
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# The parts of a checkpoint for one variable.
from tensorflow.python.training.saving import saveable_object

from tfdist._tf import storage
from tfdist._tf.private import UninitializedVariable

_log = logging.getLogger(__name__)

_STATE, _DATASET = "ITERATOR_STATE", "DATASET"
# Attributes of a dataset's ops that differ between runs of a program.
_DIFFER = "seed", "seed2", "metadata", "shared_name"
_ORDERS = b"epoch_num_random_samples"  # Once for each op that shuffles.
_CSV_HEADER = 3  # The input that says whether there is a header.
_REPEATS = "RepeatDataset", "AssertCardinalityDataset"
_IGNORE = 1  # The policy for external state, such as that of a table.
# Arguments of functions from here on are seeds; times of a clock are smaller.
LEAST_SEED = 1 << 61
_MOST_FILES, _MOST_REMOTE_FILES, _MOST_BYTES = 1000, 8, 4096


class OtherDatasetError(ValueError):
    """The position was saved from another dataset."""


class HeldPosition(UninitializedVariable):
    """An iterator's position, which a checkpoint saves in its place."""

    def __init__(self, iterator: Any) -> None:
        super().__init__(False, dtype=tf.variant, shape=tf.TensorShape(None))
        self._iterator = iterator
        self._digest, self._lost, _ = _looked_at(iterator)

    def hold(self) -> None:
        """Takes the current position, or raises the error of saving it."""
        if self._lost:
            raise tf.errors.UnimplementedError(None, None, self._lost)
        (state,) = self._iterator._serialize_to_tensors().values()
        self.assign(state, read_value=False)

    def release(self) -> None:
        """Frees the memory, which may include a buffer of examples."""
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
    """Restores an iterator's position; returns False if none was saved.

    Raises:
        OtherDatasetError: It is of another dataset; the iterator starts over.
    """
    keys = [f"iterator/.ATTRIBUTES/{name}" for name in (_STATE, _DATASET)]
    # Checkpoints of earlier versions have no digest.
    found = {key for key, _ in tf.train.list_variables(path)} & {*keys}
    if keys[0] not in found:
        return False
    state, *digest = tf.raw_ops.RestoreV2(
        prefix=path,
        tensor_names=keys[: len(found)],
        shape_and_slices=[""] * len(found),
        dtypes=[tf.variant, tf.string][: len(found)],
    )
    own, lost, num_orders = _looked_at(iterator)
    if any(each.numpy() != own.encode() for each in digest):
        raise OtherDatasetError("Its files, constants or functions differ.")
    if lost:
        raise OtherDatasetError(lost)
    if not own:
        _log.warning(
            "Whether the input is that of %s is not known: its arrays have "
            "over 2 GB, too much to compare.",
            path,
        )
    try:
        iterator._restore_from_tensors({"_STATE": state})
    except tf.errors.OpError as error:
        # A partially restored iterator has no batch, or fails.
        tf.raw_ops.MakeIterator(
            dataset=iterator._dataset._variant_tensor,
            iterator=iterator._iterator_resource,
        )
        raise OtherDatasetError(error.message.partition("\n")[0]) from error
    if num_orders and _saved_orders(state, path) < num_orders:
        _log.warning(
            "%s was saved at the end of a pass over data that is shuffled with "
            "a seed, and TensorFlow does not save how often it was shuffled: "
            "after each such restart the same orders come again. With `repeat` "
            "right after `shuffle`, the orders are as without a restart.",
            path,
        )
    return True


def _saved_orders(state: tf.Tensor, path: str) -> float:
    """The number of shuffle ops whose order a state has; inf if it is large.

    TensorFlow would crash (SIGSEGV) from 2 GB on, which buffers may reach.
    """
    files = tf.io.gfile.glob(f"{path}.data-*")
    if sum(tf.io.gfile.stat(file).length for file in files) >= 1 << 30:
        return math.inf
    return tf.io.serialize_tensor(state).numpy().count(_ORDERS)


def _looked_at(iterator: Any) -> tuple[str, str, int]:
    """The dataset's digest, what a restore loses, and how often it shuffles.

    Computed once, since the graph may hold large arrays: from 2 GB on, neither
    TensorFlow nor this function says anything about the dataset.
    """
    if not hasattr(iterator, "_tfdist_looked_at"):
        graph = graph_of(iterator._dataset)
        lost, num_orders = _lost(graph), _num_orders(graph)
        digest = digest_of(graph) if graph.node else ""
        iterator._tfdist_looked_at = digest, lost, num_orders
    return iterator._tfdist_looked_at


def graph_of(dataset: tf.data.Dataset) -> tf.compat.v1.GraphDef:
    serialized = tf.raw_ops.DatasetToGraphV2(
        input_dataset=dataset._variant_tensor,
        external_state_policy=_IGNORE,
        strip_device_assignment=True,
    )
    return tf.compat.v1.GraphDef.FromString(serialized.numpy())


def _lost(graph: tf.compat.v1.GraphDef) -> str:
    """What TensorFlow loses when it restores a position; empty if nothing."""
    for nodes in (graph.node, *(f.node_def for f in graph.library.function)):
        by_name = {node.name: node for node in nodes}
        for node in nodes:
            if node.op.startswith("SnapshotDataset"):
                return "TensorFlow cannot resume writing a `snapshot`."
            is_csv = node.op.startswith("CSVDataset")
            if is_csv and _constant(by_name, node.input[_CSV_HEADER]) != 0:
                return (
                    "When TensorFlow restores a CsvDataset with a header, it "
                    "loses rows; `tfdist.data.read_csv` loses none."
                )
            ends = node.op == "DirectedInterleaveDataset" and not (
                node.attr["stop_on_empty_dataset"].b
                or any(_is_endless(by_name, name) for name in node.input[1:])
            )
            if ends:
                return (
                    "When TensorFlow restores sample_from_datasets or "
                    "choose_from_datasets after one of the datasets has ended, "
                    "it misses the end of all. `repeat` one of them, or pass "
                    "stop_on_empty_dataset=True."
                )
    return ""


def _num_orders(graph: tf.compat.v1.GraphDef) -> int:
    """The number of ops that shuffle in a new, seeded order in each pass."""
    nodes = {node.name: node for node in graph.node}
    return sum(
        node.op == "ShuffleDatasetV3"
        and node.attr["reshuffle_each_iteration"].b
        and any(_constant(nodes, name) for name in node.input[2:4])
        for node in graph.node
    )


def _is_endless(nodes: Mapping[str, Any], name: str) -> bool:
    """Whether a dataset repeats forever, as far as the graph shows."""
    while node := nodes.get(name.partition(":")[0]):
        if node.op in _REPEATS:
            return (_constant(nodes, node.input[1]) or 0) < 0
        if "Take" in node.op or not node.input:
            return False
        name = node.input[0]
    return False


def _constant(nodes: Mapping[str, Any], name: str) -> Any:
    """The scalar input of an op, if it is a constant."""
    node = nodes.get(name.partition(":")[0])
    if node is None or node.op != "Const":
        return None
    return tf.make_ndarray(node.attr["value"].tensor).item()


def digest_of(graph: tf.compat.v1.GraphDef) -> str:
    """Identifies a dataset by its ops, functions and constants.

    The digest ignores random seeds, and int64 scalars from `LEAST_SEED` on that
    are passed to functions, which are taken for seeds. It covers the beginnings
    of the first files, so that a file may grow. Unlike that of
    `tf.raw_ops.DatasetFingerprint`, it is the same in each process even if a
    function has several side effects. Removes from the graph what is ignored.
    """
    functions = {f.signature.name: f for f in graph.library.function}
    met: list[str] = []  # Functions that are called.
    texts: list[bytes] = []  # String constants, among them paths of files.
    digest = hashlib.sha256()

    def add(nodes: Iterable[Any], names: Collection[str]) -> None:
        # Names have process-wide numbers, so they are renumbered as they occur.
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
                # An array may be large, and three times larger as text.
                digest.update(value.tensor_content)
                value.ClearField("tensor_content")
                value.ClearField("resource_handle_val")
            node.ClearField("experimental_debug_info")
            text = re.sub('"(\\^?)([^":]*)([^"]*)"', number, str(node))
            digest.update(text.encode())

    add(_without_seeds(graph.node), [node.name for node in graph.node])
    for name in met:  # Grows by the functions that a function calls.
        own = functions[name]
        arguments = [each.name for each in own.signature.input_arg]
        nodes = [node.name for node in own.node_def]
        add(_without_seeds(own.node_def), {*arguments, *nodes})
    names = [os.fsdecode(text) for text in dict.fromkeys(texts)]
    remote = [*filter(storage.is_object_store, names)]
    local = [name for name in names if os.path.isfile(name)]
    for name in (*remote[:_MOST_REMOTE_FILES], *local[:_MOST_FILES]):
        file = tf.io.gfile.GFile(name, "rb")
        with contextlib.suppress(tf.errors.OpError), file:
            digest.update(file.read(_MOST_BYTES))
    return digest.hexdigest()


def _without_seeds(nodes: Sequence[Any]) -> Iterator[Any]:
    """The nodes, except those whose outputs may be the seeds of an op."""
    numbers = {node.name for node in nodes if _is_large(node)}
    seeds = set()
    for node in nodes:
        op = getattr(tf.raw_ops, node.op, None)
        arguments = [*inspect.signature(op).parameters] if op else []
        # In a function, the name of an output has two more parts.
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
