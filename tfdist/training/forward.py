"""The graph of a model's pass over a batch, which is inspected, not run.

A step reads all rows that it needs from one server in one message, so it must
know every id before the first row arrives. Tracing therefore runs the model
(call, losses, metrics) twice: first here, with stand-ins for all values not
read yet, then with the rows. Of this graph, only ops that compute ids are
executed: nothing fails, prints or counts because of a stand-in's value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.private import accessed, late_captures, variable_handles
from tfdist.embeddings import lookups
from tfdist.training.replicas import Replicas

Values = Sequence[tuple[keras.Variable, tf.Tensor]]

# Ops whose values differ each time they run.
_UNREPEATABLE = re.compile(
    "(?!Stateless).*(Random|Multinomial|TruncatedNormal|CandidateSampler|Rng"
    "|PyFunc$|IteratorGetNext|Dequeue)|Stateful(?!PartitionedCall)"
)
_ASSIGNS = re.compile(
    "Assign.*VariableOp|Resource(Scatter|Apply)|Rng|Stateful(?!P)"
)
# Ops that return their first input, or add to it.
_ADDITIONS = {"AddV2", "Sub", "TensorScatterAdd", "TensorScatterSub"}
_ADDITIONS |= {"StopGradient", "Identity", "Cast"}
_ADDITIONS |= {"Reshape", "Squeeze", "ExpandDims"}
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
_SHAPE_OF = {"Shape", "ShapeN", "Size", "Rank"}
# Ops whose output shapes may depend on the values of floats. Those of all other
# ops depend at most on the values of integers.
_SHAPED_BY_VALUES = re.compile(
    ".*(Where|Unique|Range|ListDiff|NonMaxSupp|Call|Case|If|While|Map|Dataset)"
)


def draws(graph: tf.Graph) -> dict[str, bool]:
    """Stateful random op types, and whether an op of the type has a seed."""
    found: dict[str, bool] = {}
    for node in _nodes(graph):
        if "seed2" in node.attr:
            is_seeded = bool(node.attr["seed2"].i)
            found[node.op] = found.get(node.op, False) or is_seeded
    return found


class Forward:
    """The graph of one forward pass.

    Args:
        run: Maps a batch to a dictionary of results.
        spec: `tf.TypeSpec` structure of the batch.
        seeds: The states of random generators, which differ in each step.
        variables: Other variables the pass may read; they get stand-ins.

    Raises:
        ValueError: Ids depend on variables, rows or unrepeatable ops.
    """

    def __init__(
        self,
        run: Callable[[Any], Any],
        spec: Any,
        seeds: Sequence[keras.Variable],
        variables: Sequence[keras.Variable],
    ) -> None:
        flat = tf.nest.flatten(spec, expand_composites=True)

        def traced(*given: tf.Tensor) -> None:
            tf.compat.v1.get_default_graph().seed = None
            batch = tf.nest.pack_sequence_as(
                spec, given[: len(flat)], expand_composites=True
            )
            self._given, self._collector = list(given), lookups.Collector()
            self._seeds = seeds
            self._stand_ins = [
                (v, lookups.stand_in(v.shape, v.dtype)) for v in variables
            ]
            own = zip(seeds, given[len(flat) :], strict=True)
            self._scope = _Scope([*self._stand_ins, *own])
            for variable, value in self._stand_ins:
                if variable.trainable:
                    self._scope.tape(variable, value)
            with self._scope, lookups.answered_by(self._collector):
                self._results = tf.nest.map_structure(
                    tf.convert_to_tensor, run(batch)
                )

        signature = [tf.TensorSpec(s.shape, s.dtype) for s in [*flat, *seeds]]
        # Unlike a `tf.function`, it does not run all side effects.
        self._graph = tf.compat.v1.wrap_function(traced, signature)
        # The variables that it assigns; those whose values it uses; the table
        # of each lookup, in order.
        self.updated = list(self._scope.updated.values())
        self.read = [v for v, value in self._stand_ins if value.consumers()]
        self._before = {id(v): value for v, value in self._stand_ins}
        calls = self._collector.calls
        self.tables = [table for table, _ in calls]
        self._check_ids()
        late, self._late = late_captures(self._graph.graph)
        self._ids: Any = calls and self._graph.prune(
            [*self._given, *late], [ids for _, ids in calls]
        )

    def calls(
        self, batch: Any, seeds: Sequence[tf.Tensor], replicas: Replicas | None
    ) -> list[tuple[Any, tf.Tensor]]:
        """The table and ids of every lookup in a pass over `batch`."""
        if not self.tables:
            return []
        flat = tf.nest.flatten(batch, expand_composites=True)
        late = [told() for told in self._late]
        found = self._ids(*flat, *seeds, *tf.nest.flatten(late))
        for ids, (_, traced) in zip(found, self._collector.calls, strict=True):
            ids.set_shape(traced.shape)  # Lookup tables lose it.
        if replicas:
            pairs = zip(found, self._collector.of_all, strict=True)
            found = [
                tf.unique(replicas.gather(ids)).y if of_all else ids
                for ids, of_all in pairs
            ]
        return list(zip(self.tables, found, strict=True))

    def results(
        self, states: Sequence[keras.Variable], what: str
    ) -> Callable[..., Any]:
        """Returns a function that computes results from `states` values alone.

        As in Keras' own example, a result may precede its metric's update.
        """
        for name, other in self.no_results(states).items():
            raise ValueError(
                f"{what} returns {name!r}, which depends on {other}, so it has "
                "no value for several batches. Give the model a "
                "`keras.metrics.Mean`, update it there and return its "
                "`result()`."
            )
        after, before = self._values_of(states)
        changed = [i for i, t in enumerate(before) if t is not after[i]]
        given = [*after, *(before[i] for i in changed)]
        results = self._graph.prune(given, self._results)
        return lambda *values: results(*values, *(values[i] for i in changed))

    def _values_of(
        self, states: Sequence[keras.Variable]
    ) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """The values of `states` after the pass, and before it."""
        after = [self._scope.get_current_value(v) for v in states]
        return after, [self._before[id(v)] for v in states]

    def no_results(self, states: Sequence[keras.Variable]) -> dict[str, str]:
        """Maps results that depend on more than `states` to what else."""
        batch = dict.fromkeys((t.op.name for t in self._given), "the batch")
        others = self._others() | batch
        after, before = self._values_of(states)
        values = [*after, *before]
        return {
            name: others[op.name]
            for name, result in self._results.items()
            for op, _ in _needed(tf.nest.flatten(result), values)
            if op.name in others
        }

    def adds_to(
        self, variable: keras.Variable, states: Sequence[keras.Variable]
    ) -> bool:
        """Whether a pass only adds to a variable, independently of `states`."""
        names = {self._before[id(v)].op.name for v in states}
        value: Any = self._scope.get_current_value(variable)
        while value.name != self._before[id(variable)].name:
            op = value.op
            changed = [
                any(o.name in names and not shape for o, shape in _needed([t]))
                for t in op.inputs
            ]
            # Either operand of a sum may be the state.
            if op.type == "AddV2" and changed == [False, True]:
                value = op.inputs[1]
            elif op.type in _ADDITIONS and changed[0] and sum(changed) == 1:
                value = op.inputs[0]
            else:
                return False
        return True

    def _others(self) -> dict[str, str]:
        """What each stand-in replaces, by the name of its op."""
        return {
            value.op.name: f"variable {v.path!r}"
            for v, value in self._stand_ins
        } | dict.fromkeys(self._collector.answers, "the rows of a table")

    def draws(self) -> dict[str, bool]:
        """See the function `draws`."""
        return draws(self._graph.graph)

    def check_draws(self) -> None:
        """Raises `ValueError` if workers would draw the same random numbers."""
        found = self.draws()
        if seeded := [op for op, is_seeded in found.items() if is_seeded]:
            raise ValueError(
                f"The model uses TensorFlow's {', '.join(seeded)} with a seed: "
                "all workers would draw the same numbers, and repeat them in "
                "every step of a dispatch. Remove the seed, or use "
                "`keras.random` with a `keras.random.SeedGenerator`."
            )

    def check_stand_ins(self) -> None:
        """Raises `ValueError` if a variable is used despite its stand-in."""
        graph = self._graph.graph
        captured = {id(t) for t in graph.external_captures}
        has_calls = any(op.type in _CALLS for op in graph.get_operations())
        variables = [v for v, _ in self._stand_ins]
        read = {id(v) for v in self.read}
        for variable in [*variables, *self._seeds]:
            # The copies of all replicas.
            own = getattr(variable.value, "values", [variable.value])
            is_used = any(id(v.handle) in captured for v in own)
            if is_used and not variable.trainable:
                is_used = self._assigns()  # A frozen SavedModel does not.
            # A function that created it contains its initial value.
            is_lost = variable.trainable and id(variable) not in read
            if is_used or (has_calls and is_lost):
                raise ValueError(
                    f"A `tf.function` of the model uses {variable.path!r} as "
                    "it was when the function was first traced, so its "
                    "gradient or assigned value would be lost. Remove the "
                    "decorator: a step is one `tf.function` anyway. To use the "
                    "layer of a SavedModel, set trainable=False."
                )

    def unlisted(self) -> tuple[list[tf.Tensor], bool]:
        """The handles of all other variables; whether any is assigned."""
        handles = variable_handles(self._graph.graph)
        return handles, bool(handles) and self._assigns()

    def _assigns(self) -> bool:
        """Whether an op assigns; Keras assigns by setting scope values."""
        return any(_ASSIGNS.match(n.op) for n in _nodes(self._graph.graph))

    def _check_ids(self) -> None:
        """Raises `ValueError` if ids might change once rows are known."""
        others = self._others()
        library = self._graph.graph.as_graph_def().library
        functions = {f.signature.name: f.node_def for f in library.function}
        for table, ids in self._collector.calls:
            for op, is_shape in _needed([ids]):
                if is_shape:
                    continue
                if op.name in others:
                    raise ValueError(
                        f"The ids of table {table.path!r} depend on "
                        f"{others[op.name]}, so they cannot be known before "
                        "the step reads any. Compute ids, and their number, "
                        "from the batch and random numbers alone."
                    )
                for kind in _kinds(op.node_def, functions):
                    if _UNREPEATABLE.match(kind):
                        raise ValueError(
                            f"The ids of table {table.path!r} come from a "
                            f"{kind} op, which returns other values each time "
                            "it runs, but a step computes the ids twice: "
                            "before and after it reads rows. Draw ids with "
                            "`keras.random` and a `SeedGenerator` that the "
                            "model holds, or in the input function."
                        )


class TapedScope(keras.StatelessScope):
    """A scope whose values a `tf.GradientTape` treats as the variables."""

    def __init__(self, values: Values) -> None:
        super().__init__(values, collect_losses=True)
        self._taped: set[int] = set()
        self._entered: tf.Graph | None = None
        # The graph of the branch or loop that last assigned a variable.
        self._inner: dict[int, tf.Graph] = {}
        self.has_ended = False

    def __enter__(self) -> TapedScope:
        self._entered = tf.compat.v1.get_default_graph()
        return super().__enter__()

    def tape(self, variable: keras.Variable, value: tf.Tensor) -> None:
        """Gives a variable this value, or rows, until it is assigned."""
        self.state_mapping[id(variable)] = value
        self._taped.add(id(variable))

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Assigns like a `tf.Variable`, through which no gradient flows."""
        variable, value = update
        super().add_update((variable, tf.stop_gradient(value)))
        graph = tf.compat.v1.get_default_graph()
        self._inner.pop(id(variable), None)
        if graph is not self._entered:
            self._inner[id(variable)] = graph

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See `keras.StatelessScope`."""
        value = super().get_current_value(variable)
        inner = self._inner.get(id(variable))
        if inner is not None and inner not in _graphs_around():
            raise ValueError(
                f"The model assigns {variable.path!r} in a branch or a loop "
                "(`ops.cond`, `while_loop`, `map_fn`, a cell of an RNN), so no "
                "value is known outside of it. Return the new value from it, "
                "and assign that outside, or assign `ops.where(condition, new, "
                "old)`; create an RNN with unroll=True."
            )
        if id(variable) in self._taped:
            if self.has_ended:
                raise ValueError(
                    f"The `train_step` reads {variable.path!r} after it has "
                    "applied gradients. On parameter servers, and with a "
                    "PartitionedEmbedding between replicas, they are applied "
                    "after the step. Read it before, or train in one process."
                )
            accessed(value)
        return value


class _Scope(TapedScope):
    """Records which variables are assigned; each value is a new tensor."""

    def __init__(self, values: Values) -> None:
        super().__init__(values)
        self.updated: dict[int, keras.Variable] = {}

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, _ = update
        self.updated[id(variable)] = variable
        super().add_update(update)


def _graphs_around() -> Iterator[tf.Graph]:
    """The graph that is being traced, and those around it."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def _nodes(graph: tf.Graph) -> Iterator[Any]:
    """All ops of a graph and of its functions."""
    whole = graph.as_graph_def()
    yield from whole.node
    for function in whole.library.function:
        yield from function.node_def


def _needed(
    tensors: Sequence[tf.Tensor], stop: Sequence[tf.Tensor] = ()
) -> Iterator[tuple[tf.Operation, bool]]:
    """The ops on which tensors depend, and whether only on their shape."""
    seen = {(tensor.name, False) for tensor in stop}
    waiting = [(tensor, False) for tensor in tensors]
    while waiting:
        tensor, is_shape = waiting.pop()
        known = is_shape and tensor.shape.is_fully_defined()
        if known or (tensor.name, is_shape) in seen:
            continue
        seen.add((tensor.name, is_shape))
        op = tensor.op
        yield op, is_shape
        if not is_shape:
            waiting += [(t, False) for c in op.control_inputs for t in c.inputs]
        waiting += [(t, _only_shape(op, t, is_shape)) for t in op.inputs]


def _only_shape(op: tf.Operation, of: tf.Tensor, is_shape: bool) -> bool:
    """Whether an op (or its output's shape) needs only the input's shape."""
    by_floats = of.dtype.is_floating and not _SHAPED_BY_VALUES.match(op.type)
    return op.type in _SHAPE_OF or (is_shape and by_floats)


def _kinds(node: Any, functions: dict[str, Any]) -> Iterator[str]:
    """The type of an op, and those of the ops in the functions it calls."""
    yield node.op
    for attr in node.attr.values():
        for function in (attr.func, *attr.list.func):
            for inner in functions.get(function.name, ()):
                yield from _kinds(inner, functions)
