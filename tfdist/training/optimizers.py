"""Applies updates on the variable's own device.

A worker pushes gradients; the optimizer's arithmetic runs on the parameter
server that holds the variable and its slots, as it did in TF1. Keras' own
`Optimizer.apply` would run it in the caller, and increment `iterations` by a
read, an addition and a write, which loses counts when two workers do so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.optimizers import Optimizer

from tfdist._tf import private_keras, versions
from tfdist._tf.mutex import locked
from tfdist._tf.tracing import traced_once
from tfdist.embeddings.growing import GrowingShards, SlotDefaults
from tfdist.training.kernels import fused_update, is_fused
from tfdist.training.multi_optimizer import MultiOptimizer
from tfdist.training.slots import (
    AssigningScope,
    RowView,
    named_slots,
    rows_of,
    slots,
)

# Rules whose updates depend on norms or products over all rows.
_WHOLE_VARIABLE = (keras.optimizers.Lamb, keras.optimizers.Muon)
# Rules that read a slot after assigning it and expect its old value, as on
# other backends; a TensorFlow variable returns the new one.
_READS_OLD_SLOTS = versions.ScheduleFreeAdamW
# From this number of variables on, tracing an update costs more than what a
# call that is not inlined (0.05 ms) adds to each of ten thousand steps.
_LONG = 16


def build(optimizer: Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Creates the slots of `variables`, each on its variable's device.

    Call this in the strategy's scope: Keras would create them on the chief.
    """
    if not optimizer.built:
        optimizer.build(list(variables))
    if not private_keras.counter(optimizer).numpy():
        begin(optimizer, variables)


def begin(optimizer: Optimizer, variables: Sequence[keras.Variable]) -> None:
    """Initializes slots to their variables' values, where rules require it.

    In Keras the first step sets all averages of `use_ema=True`, but a step that
    updates only some rows of a table cannot.
    """
    for variable in variables:
        part = parts(optimizer)[owner(optimizer, variable)]
        with tf.device(variable.value.device):
            for slot in _begun(part, variable):
                slot.value.assign(variable.value)


def _begun(optimizer: Optimizer, variable: keras.Variable) -> list[Any]:
    """The slots whose initial value is that of the variable."""
    own = slots(optimizer, variable)
    is_free = isinstance(optimizer, versions.ScheduleFreeAdamW)
    first = own.of_rule[:1] if is_free else []
    return [own.average, *first] if optimizer.use_ema else first


def finish(optimizer: Optimizer, variables: Sequence[keras.Variable]) -> bool:
    """Assigns averages of `use_ema` to `variables`; returns whether any exist.

    Like `finalize_variable_values`, but no value leaves its server.
    """
    found = False
    for variable in variables if optimizer.built else ():
        part = parts(optimizer)[owner(optimizer, variable)]
        if part.use_ema:
            found = True
            with tf.device(variable.value.device):
                variable.value.assign(slots(part, variable).average.value)
    return found


def parts(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that `optimizer` consists of, usually just itself."""
    # A LossScaleOptimizer wraps the one that applies unscaled gradients.
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, versions.KerasMultiOptimizer):
        return optimizer.optimizers
    is_multi = isinstance(optimizer, MultiOptimizer)
    return optimizer.parts if is_multi else [optimizer]


def owner(optimizer: Optimizer, variable: keras.Variable) -> int:
    """The index in `parts(optimizer)` of the part that updates `variable`."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(optimizer, versions.KerasMultiOptimizer):
        return private_keras.part_index(optimizer, variable)
    is_multi = isinstance(optimizer, MultiOptimizer)
    return optimizer.owner(variable) if is_multi else 0


def part_names(optimizer: Optimizer) -> list[str]:
    """The names of `parts`; the second of two Adagrads is `adagrad_1`."""
    names = [part.name for part in parts(optimizer)]
    return [
        f"{name}_{names[:i].count(name)}" if name in names[:i] else name
        for i, name in enumerate(names)
    ]


def check_rows(optimizer: Optimizer, variable: keras.Variable) -> None:
    """Raises `ValueError` if the rule cannot update only some rows."""
    own = slots(optimizer, variable).of_rule
    has_other_shapes = any(v.shape != variable.shape for v in own)
    if has_other_shapes or isinstance(optimizer, _WHOLE_VARIABLE):
        raise ValueError(
            f"The rule of {type(optimizer).__name__} needs the whole variable, "
            f"so it cannot update some rows of {variable.path!r}. Use a "
            "tfdist.MultiOptimizer with another optimizer for tables, for "
            "example Adagrad."
        )


def learning_rate(
    optimizer: Optimizer, iteration: tf.Tensor, values: Sequence[tuple]
) -> tf.Tensor:
    """The learning rate of one of `parts`, a float32 scalar.

    `values`: pairs of variables and their values, which are not read again.
    """
    known = [(private_keras.counter(optimizer), iteration), *values]
    with keras.StatelessScope(known):
        return tf.cast(optimizer.learning_rate, tf.float32)


def update(
    optimizer: Optimizer,
    variable: keras.Variable,
    gradient: tf.Tensor,
    rate: tf.Tensor,
    iteration: tf.Tensor,
    ids: tf.Tensor | None = None,
) -> None:
    """Applies a gradient; the caller opens the variable's device scope.

    With `ids` (int64, unique) the optimizer's own rule runs on these rows of
    the variable and of its slots. The result equals that of Keras for rules
    that do not change rows with a zero gradient: SGD, Adagrad, and Ftrl for a
    table that starts at zeros, with a constant learning rate and no
    `l2_shrinkage_regularization_strength` (Keras' dense Ftrl sets rows that
    never had a gradient to zero). Rules that do change them (moments, momentum,
    weight decay, moving averages) change a row only when it is looked up, like
    the "lazy" optimizers of TF1's contrib.

    `optimizer` is the part that owns `variable`, `rate` comes from
    `learning_rate`, `iteration` (int64) counts the updates before this one.
    """
    target, decay = variable.value, _decay(optimizer, variable)
    rate = tf.cast(rate, variable.dtype)
    if ids is not None:
        check_rows(optimizer, variable)
    if decay:
        _add(target, -rows_of(target, ids) * (decay * rate), ids)
    counted = private_keras.counter(optimizer), iteration
    with AssigningScope([counted]) as scope:
        if is_fused(optimizer, ids is not None):
            fused_update(optimizer, variable, gradient, rate, ids)
        else:
            views = []
            if ids is not None or isinstance(optimizer, _READS_OLD_SLOTS):
                for whole in (variable, *slots(optimizer, variable).of_rule):
                    views.append(RowView(scope, whole, ids))
            optimizer.update_step(gradient, variable, rate)
            for view in views:
                view.scatter()
    _follow(optimizer, variable, iteration, ids)


def is_one_op(
    optimizer: Optimizer, variable: keras.Variable, by_rows: bool
) -> bool:
    """Whether an update is a single op, which locks the variable."""
    return is_fused(optimizer, by_rows) and not (
        _decay(optimizer, variable)
        or optimizer.use_ema
        or variable.constraint is not None
        or optimizer.gradient_accumulation_steps
    )


def _follow(
    optimizer: Optimizer,
    variable: keras.Variable,
    iteration: tf.Tensor,
    ids: tf.Tensor | None,
) -> None:
    """Updates averages and applies constraints, even if gradients are kept."""
    target = variable.value
    if optimizer.use_ema:
        average = slots(optimizer, variable).average.value
        updates = _updates(optimizer, iteration)
        # At the first update, the average is set to the variable's value.
        later = tf.cast(updates > 0, tf.float32)
        weight = tf.cast(1.0 - later * optimizer.ema_momentum, variable.dtype)
        difference = rows_of(target, ids) - rows_of(average, ids)
        _add(average, difference * weight, ids)
        if every := optimizer.ema_overwrite_frequency:

            def overwrite() -> None:
                target.assign(tf.convert_to_tensor(average))

            tf.cond((updates + 1) % every == 0, overwrite, lambda: None)
    if variable.constraint is not None:
        rows = variable.constraint(tf.convert_to_tensor(rows_of(target, ids)))
        if ids is None:
            target.assign(rows)
        else:
            target.scatter_update(tf.IndexedSlices(rows, ids))


def apply(
    optimizer: Optimizer,
    found: Sequence[tuple[Any, tf.Tensor, Any]],
    rate: tf.Tensor,
    iteration: tf.Tensor,
    shared: bool = False,
    functions: dict[Any, Any] | None = None,
) -> None:
    """Applies or accumulates a step's `(variable, gradient, ids)` triples.

    With `gradient_accumulation_steps`, the last of that many steps applies the
    mean of the gradients that all workers have sent by then. Growing shards are
    passed together, as `GrowingShards` with keys in `Found`; new keys get rows.

    If others may apply updates at the same time (`shared`), they take turns so
    that none is lost: per variable if each update `is_one_op`, else per device.

    `functions` keeps long updates, which are then traced once for all steps of
    a dispatch, and compiled once if not `shared`: Adam's of 26 tables is most
    of a step's graph.
    """
    found = [
        own for each in found for own in _claimed(optimizer, *each, iteration)
    ]
    if all(is_one_op(optimizer, v, ids is not None) for v, _, ids in found):
        _apply(optimizer, found, rate, iteration)
        return
    variables, gradients, ids = zip(*found, strict=True)

    def run(gradients: Any, ids: Any, *now: tf.Tensor) -> None:
        own = list(zip(variables, gradients, ids, strict=True))
        update = functools.partial(_apply, optimizer, own, *now)
        if shared:
            needed = [*gradients, *(i for i in ids if i is not None), *now]
            locked(f"{optimizer.name}/updates", update, needed)
        else:
            update()

    # Not on replicas, each of which updates its own copy of a variable.
    is_alone = shared or not tf.distribute.has_strategy()
    if functions is not None and len(found) >= _LONG and is_alone:
        key = tuple((id(v), i is None) for v, _, i in found)
        if key not in functions:
            # Not inlined, a server made 6 % fewer steps per second.
            functions[key] = traced_once(run, inline=shared)
        run = functions[key]
    run(gradients, ids, rate, iteration)


def _apply(
    optimizer: Optimizer,
    found: Sequence[tuple[keras.Variable, tf.Tensor, tf.Tensor | None]],
    rate: tf.Tensor,
    iteration: tf.Tensor,
) -> None:
    if not optimizer.gradient_accumulation_steps:
        for variable, gradient, ids in found:
            update(optimizer, variable, gradient, rate, iteration, ids)
        return
    for variable, gradient, ids in found:
        _add(slots(optimizer, variable).total.value, gradient, ids)

    def apply_means() -> None:
        means = [_mean(optimizer, v, ids is not None) for v, _, ids in found]
        clipped = _clip(optimizer, [mean for mean, _ in means])
        for (variable, *_), mean, (_, ids) in zip(
            found, clipped, means, strict=True
        ):
            update(optimizer, variable, mean, rate, iteration, ids)

    def wait() -> None:
        for variable, _, ids in found:
            _follow(optimizer, variable, iteration, ids)

    tf.cond(_is_due(optimizer, iteration), apply_means, wait)


def _claimed(
    optimizer: Optimizer,
    variable: keras.Variable | GrowingShards,
    gradient: tf.Tensor,
    ids: Any,
    iteration: tf.Tensor,
) -> list[tuple[keras.Variable, tf.Tensor, tf.Tensor | None]]:
    """The gradient and rows of each growing shard; claims rows for new keys."""
    if not isinstance(variable, GrowingShards):
        return [(variable, gradient, ids)]
    first = getattr(optimizer, "initial_accumulator_value", 0.0)
    begins = {"accumulator": first}  # As in Keras; other slots at zero.
    beside: list[SlotDefaults] = []
    for shard in variable.shards:
        kinds = named_slots(optimizer, shard) if variable.evicts else {}
        own = [(slot, begins.get(kind, 0.0)) for kind, slot in kinds.items()]
        beside.append([*own, *((s, None) for s in _begun(optimizer, shard))])
    claimed = variable.claimed(ids, gradient, iteration, beside)
    return [
        (shard, own, rows)
        for shard, (rows, own) in zip(variable.shards, claimed, strict=True)
    ]


def _is_due(optimizer: Optimizer, iteration: tf.Tensor) -> tf.Tensor:
    """Whether a step is the last of those that accumulate gradients."""
    steps = optimizer.gradient_accumulation_steps or 1
    return tf.equal((iteration + 1) % steps, 0)


def _mean(
    optimizer: Optimizer, variable: keras.Variable, by_rows: bool
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Takes the mean of the accumulated gradients, and the ids of its rows.

    Gradients that others add meanwhile are left for the next update.
    """
    total, ids = slots(optimizer, variable).total.value, None
    if by_rows:
        ids = tf.where(tf.reduce_any(tf.not_equal(total, 0), axis=1))[:, 0]
    taken = rows_of(total, ids)
    _add(total, -taken, ids)
    return taken / optimizer.gradient_accumulation_steps, ids


def begin_step(
    optimizer: Optimizer,
    iteration: tf.Tensor,
    finite: tf.Tensor | None = None,
    shared: bool = False,
) -> None:
    """Updates Nadam's momentum product; for `shared` see `apply`."""
    if not (isinstance(optimizer, keras.optimizers.Nadam) and optimizer.built):
        return
    product = private_keras.nadam_product(optimizer).value
    updates = tf.cast(_updates(optimizer, iteration), product.dtype)
    power = tf.cast(0.96, product.dtype) ** (updates + 1.0)
    factor = optimizer.beta_1 * (1.0 - 0.5 * power)
    is_update = _is_due(optimizer, iteration)
    if finite is not None:
        is_update &= finite
    factor = tf.where(is_update, factor, tf.ones_like(factor))

    def run() -> None:
        product.assign(product * factor)

    if shared:
        with tf.device(product.device):
            locked(f"{optimizer.name}/product", run, [tf.identity(factor)])
    else:
        run()


def clip(optimizer: Optimizer, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Clips all gradients of a part according to its options.

    A table's gradient is that of its unique rows, which has the same norm. If
    gradients are accumulated, their mean is clipped instead.
    """
    if optimizer.loss_scale_factor is not None:
        gradients = [g / optimizer.loss_scale_factor for g in gradients]
    accumulates = optimizer.gradient_accumulation_steps
    return gradients if accumulates else _clip(optimizer, gradients)


def _clip(optimizer: Optimizer, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    if norm := limit(optimizer, "clipnorm"):
        return [tf.clip_by_norm(g, norm) for g in gradients]
    if global_norm := limit(optimizer, "global_clipnorm"):
        return tf.clip_by_global_norm(gradients, global_norm)[0]
    if most := limit(optimizer, "clipvalue"):
        return [tf.clip_by_value(g, -most, most) for g in gradients]
    return gradients


def limit(optimizer: Optimizer, name: str) -> float:
    """The value of `clipnorm` or a similar option; 0 if None or negative."""
    return max(getattr(optimizer, name) or 0, 0)


def _updates(optimizer: Optimizer, iteration: tf.Tensor) -> tf.Tensor:
    """The number of updates, as Keras counts them, before an iteration."""
    return iteration // (optimizer.gradient_accumulation_steps or 1)


def _add(target: tf.Variable, value: tf.Tensor, ids: tf.Tensor | None) -> None:
    if ids is None:
        target.assign_add(value)
    else:
        target.scatter_add(tf.IndexedSlices(value, ids))


def _decay(optimizer: Optimizer, variable: keras.Variable) -> float | None:
    """The weight decay that applies to `variable`."""
    decay = optimizer.weight_decay
    if isinstance(optimizer, keras.optimizers.Muon):
        # Muon trains some variables with AdamW; only these have a velocity.
        index = private_keras.variable_index(optimizer, variable)
        if optimizer.adam_velocities[index] is not None:
            decay = optimizer.adam_weight_decay
    decays = private_keras.uses_weight_decay(optimizer, variable)
    return decay if decays else None
