"""Descriptions of variables, the only input of a placement.

A description is built from a TF1 op, a variable, the arguments of a variable
creator, or a model function that runs without allocating large variables. A
placement can therefore be decided and printed without a cluster.
"""

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdist._tf.arguments import check_at_least, check_callable, check_type
from tfdist._tf.private import UninitializedVariable
from tfdist._tf.private_keras import (
    ColocatedZeros,
    forget_rates,
    make_paths_unique,
    settings,
    use_settings,
)

# Keras reads some variables while it builds (seed states, learning rates). They
# are tiny, so these get memory at once while a model is described.
_MAX_REAL_ELEMENTS = 1024
# Others get it when `model_fn` reads them, if there are no more elements.
_MAX_READ_ELEMENTS = 1 << 28


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """Describes a variable to a placement strategy.

    Attributes:
        name: The variable's name; for a Keras variable, its `path`.
        shape: Tuple of ints, `None` for unknown sizes; or `None`: unknown rank.
        dtype: Name of the dtype; any argument of `tf.as_dtype` is accepted.
        trainable: Whether the variable receives gradients. Default: True.
        num_slots: Number of slot variables with the variable's shape and dtype,
            on the same server. Default: 0.
        extra_bytes: Bytes of slot variables of other shapes (such as the
            factors of Adafactor), on the same server. Default: 0.
        rows_per_step: Unique rows that a step looks up. Default: every step
            reads the whole variable.

    Raises:
        ValueError: If a dimension or a count is negative.
        TypeError: If `name` is not a string.

    >>> table = VariableSpec("table", (1000, 16), num_slots=1)
    >>> table.num_rows, table.num_elements
    (1000, 16000)
    """

    name: str
    shape: tuple[int | None, ...] | None
    dtype: str = "float32"
    _: dataclasses.KW_ONLY
    trainable: bool = True
    num_slots: int = 0
    extra_bytes: int = 0
    rows_per_step: int | None = None

    def __post_init__(self) -> None:
        check_type("name", self.name, str)
        shape = tf.TensorShape(self.shape)
        known = None if shape.rank is None else tuple(shape.as_list())
        object.__setattr__(self, "shape", known)
        dtype = tf.as_dtype(self.dtype).base_dtype.name
        object.__setattr__(self, "dtype", dtype)
        for field in ("num_slots", "extra_bytes", "rows_per_step"):
            check_at_least(field, getattr(self, field), 0)

    @property
    def num_elements(self) -> int | None:
        """Number of elements; `None` if the shape is not fully known."""
        return tf.TensorShape(self.shape).num_elements()

    @property
    def num_rows(self) -> int:
        """Size of axis 0; 1 for a scalar or if it is unknown."""
        rows = self.shape[0] if self.shape else None
        return 1 if rows is None else rows


def kind_of(spec: VariableSpec) -> tuple[str, Any, str]:
    """Returns the last part of the name, the shape and the dtype."""
    return spec.name.rsplit("/", 1)[-1], spec.shape, spec.dtype


def full_name(variable: Any) -> str:
    """Returns the name of a variable, a `VariableSpec` or a TF1 op."""
    name = getattr(variable, "path", None) or variable.name
    return name.removesuffix(":0")


def variable_spec(variable: Any) -> VariableSpec:
    """Describes a variable or the TF1 op that creates one, without slots."""
    if isinstance(variable, VariableSpec):
        return variable
    if hasattr(variable, "node_def") and hasattr(variable, "outputs"):
        return _op_spec(variable)
    if hasattr(variable, "shape") and hasattr(variable, "dtype"):
        return VariableSpec(
            full_name(variable),
            variable.shape,
            variable.dtype,
            trainable=bool(getattr(variable, "trainable", True)),
        )
    raise TypeError(
        "Argument `variable` must be a `VariableSpec`, a variable or a TF1 "
        f"variable op. Received: variable={variable!r}."
    )


def _op_spec(op: tf.Operation) -> VariableSpec:
    if op.type not in ("VarHandleOp", "Variable", "VariableV2"):
        raise TypeError(
            "The size is known only for ops of type VarHandleOp, Variable and "
            f"VariableV2. Received: op {op.name!r} of type {op.type}. Give the "
            "strategy a load function that supports such ops, or remove their "
            "type from `ps_ops`."
        )
    # The output of a VarHandleOp is a scalar resource, and the output of a
    # scalar `Variable` has no shape: only the attributes are reliable.
    shape = tf.TensorShape(op.get_attr("shape"))
    return VariableSpec(op.name, shape, op.get_attr("dtype"))


def creation_spec(
    name: str | None = None,
    initial_value: Any = None,
    shape: Any = None,
    dtype: Any = None,
    trainable: bool | None = None,
    **unused_kwargs: Any,
) -> VariableSpec:
    """Describes a variable from the arguments of a variable creator.

    A callable initial value is only traced in a scratch graph for its shape and
    dtype: nothing is allocated and random states do not change.
    """
    if shape is None or dtype is None:
        value = initial_value
        if callable(value):
            graph = tf.__internal__.FuncGraph("initial_value")
            with _kept_random_state(), graph.as_default():
                value = value()
        if not hasattr(value, "shape") or not hasattr(value, "dtype"):
            value = tf.convert_to_tensor(value, dtype)
        shape = value.shape if shape is None else shape
        dtype = value.dtype if dtype is None else dtype
    return VariableSpec(
        (name or "Variable").removesuffix(":0"),
        shape,
        dtype,
        trainable=trainable is not False,
    )


def describe(
    model_fn: Callable[[], keras.Model],
    *,
    rows_per_step: Mapping[str, int] | None = None,
) -> tuple[VariableSpec, ...]:
    """Describes the variables of a model without allocating them.

    `model_fn` runs in a separate thread, where Keras numbers layers from the
    start, as for the first model of a process; the names of the caller's layers
    do not change. Large variables get a handle but no memory, so a table of
    10^9 rows is described in a fraction of a second. One that `model_fn` reads
    or assigns gets memory, if it has at most 2^28 elements.

    Args:
        model_fn: Callable without arguments that returns a built and compiled
            `keras.Model`. A model that is not compiled has no slot variables.
        rows_per_step: Dict from variable names to the number of unique rows a
            step looks up, for embedding tables. Default: no such table.

    Returns:
        A tuple of `VariableSpec` in order of creation: the model's weights and
        seed states, without metrics and the optimizer's counters.
        Slot variables are counted in `num_slots` of their variable.

    Raises:
        TypeError: If `model_fn` is not callable or returns no Keras model.
        ValueError: If the model is not built, `model_fn` reads a larger
            variable, or `rows_per_step` has an unknown name.

    >>> def model_fn():
    ...     model = keras.Sequential(
    ...         [keras.Input([1]), keras.layers.Embedding(1_000_000_000, 20)]
    ...     )
    ...     model.compile(keras.optimizers.Adagrad())
    ...     return model
    >>> [(spec.name, spec.num_slots) for spec in describe(model_fn)]
    [('sequential/embedding/embeddings', 1)]
    """
    check_callable("model_fn", model_fn)
    current = settings()

    def described(most_real: int) -> list[VariableSpec]:
        with _kept_random_state(), futures.ThreadPoolExecutor(1) as thread:
            args = model_fn, current, most_real
            return thread.submit(_describe, *args).result()

    try:
        specs = described(_MAX_REAL_ELEMENTS)
    except tf.errors.InvalidArgumentError:
        # A `tf.function` (`predict`, ...) reads variables that have no memory.
        specs = described(_MAX_READ_ELEMENTS)
    rows_per_step, names = rows_per_step or {}, {spec.name for spec in specs}
    if unknown := sorted(rows_per_step.keys() - names):
        raise ValueError(
            "Argument `rows_per_step` must name variables of the model. "
            f"Received: {unknown}; the model has {sorted(names)}."
        )
    return tuple(
        dataclasses.replace(spec, rows_per_step=rows_per_step.get(spec.name))
        for spec in specs
    )


class _LateVariable(UninitializedVariable):
    """A variable that gets memory, and its value, when a program reads it."""

    initial: Any = None

    def _begin(self) -> None:
        if self.initial is None or not tf.executing_eagerly():
            return
        initial, self.initial = self.initial, None
        if tf.raw_ops.VarIsInitializedOp(resource=self.handle):
            return
        if self.shape.num_elements() > _MAX_READ_ELEMENTS:
            message = f"{self.name} is too large to be read here: {self.shape}"
            raise tf.errors.ResourceExhaustedError(None, None, message)
        self.assign(initial() if callable(initial) else initial)

    def value(self) -> tf.Tensor:
        self._begin()
        return super().value()

    def read_value(self) -> tf.Tensor:
        self._begin()
        return super().read_value()

    def sparse_read(self, indices: tf.Tensor, name: str | None = None) -> Any:
        self._begin()
        return super().sparse_read(indices, name)


def _describe(
    model_fn: Callable[[], keras.Model], current: dict[str, Any], most_real: int
) -> list[VariableSpec]:
    use_settings(current)
    order: dict[int, int] = {}
    unread: list[_LateVariable] = []

    def creator(next_creator: Callable, **kwargs: Any) -> tf.Variable:
        spec = creation_spec(**kwargs)
        if (spec.num_elements or 0) > most_real:
            variable = _LateVariable(
                name=spec.name,
                shape=spec.shape,
                dtype=tf.as_dtype(spec.dtype),
                trainable=spec.trainable,
            )
            variable.initial = kwargs.get("initial_value")
            unread.append(variable)
        else:
            variable = next_creator(**kwargs)
        order[id(variable)] = len(order)
        return variable

    with tf.variable_creator_scope(creator):
        model = _build(model_fn)
        for variable in unread:
            variable.initial = None  # Some optimizers copy variables.
        metrics = {id(variable) for variable in model.metrics_variables}
        variables = [
            v
            for v in model.variables
            if id(v) not in metrics and not isinstance(v, ColocatedZeros)
        ]
        variables.sort(key=lambda v: order.get(id(v.value), len(order)))
        if optimizer := getattr(model, "optimizer", None):
            forget_rates(optimizer)
        return [_with_slots(v, model) for v in variables]


def _build(model_fn: Callable[[], keras.Model]) -> keras.Model:
    try:
        model = model_fn()
    except tf.errors.ResourceExhaustedError as e:
        raise ValueError(
            "Argument `model_fn` failed when called without memory for large "
            "variables. If it reads the value of a variable (a model that is "
            "built by calling it on data does), build the model from "
            "`keras.Input` or with `model.build(input_shape)` instead. "
            f"TensorFlow says: {e}"
        ) from e
    if not isinstance(model, keras.Model):
        raise TypeError(
            "Argument `model_fn` must return a `keras.Model`. "
            f"Received: {model!r}."
        )
    # An adversarial network has no `call`: only its submodels are ever built.
    if not (model.built or model.weights):
        raise ValueError(
            "Argument `model_fn` must return a built model; otherwise its "
            "variables are unknown. Begin with `keras.Input(...)` or call the "
            f"model on one. Received: {model!r}."
        )
    make_paths_unique(model)
    return model


def _with_slots(variable: keras.Variable, model: keras.Model) -> VariableSpec:
    """Describes a variable with the slots that a copy of the optimizer adds."""
    spec = variable_spec(variable)
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None or not variable.trainable:
        return spec
    # Slots cannot be found by name: Adafactor's factors have none.
    slots = _state(optimizer, [variable])
    for shape, _ in _state(optimizer, []):
        # These come first. Nadam's scalar takes the dtype of the variables.
        slots.remove(next(slot for slot in slots if slot[0] == shape))
    like = (tuple(variable.shape), spec.dtype)
    extra = sum(
        int(np.prod(shape)) * tf.as_dtype(dtype).size
        for shape, dtype in slots
        if (shape, dtype) != like
    )
    return dataclasses.replace(
        spec, num_slots=slots.count(like), extra_bytes=extra
    )


def _state(
    optimizer: keras.Optimizer, variables: list[keras.Variable]
) -> list[tuple[tuple[int, ...], str]]:
    try:
        copy = type(optimizer).from_config(optimizer.get_config())
    except TypeError as e:
        raise TypeError(
            f"Could not copy {type(optimizer).__name__} to find its slot "
            "variables. Let its `get_config` return all arguments of its "
            f"`__init__`. Python says: {e}"
        ) from e
    # ScheduleFreeAdamW would begin at values, which large variables lack here.
    copy.assign = lambda *_: None
    copy.build(variables)
    return [(tuple(v.shape), v.dtype) for v in copy.variables]


@contextlib.contextmanager
def _kept_random_state() -> Iterator[None]:
    # An unseeded Keras initializer draws its seed from `random`; a plan must
    # not change the numbers of the training that follows it.
    state, of_numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(state)
        np.random.set_state(of_numpy)
