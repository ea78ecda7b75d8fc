"""Checks and passes of the compiled model that a model function returns."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf import private_keras
from tfdist._tf.private import single_replica_view
from tfdist.embeddings import lookups
from tfdist.training.exchange import Parameters, answers
from tfdist.training.forward import TapedScope
from tfdist.training.layout import Layout

_log = logging.getLogger(__name__)

# Attribute of a model that was built from batches: their spec.
_ELEMENT_SPEC = "_tfdist_element_spec"


def overrides(model: keras.Model, method: str) -> bool:
    """Whether a model overrides `method` of `keras.Model`."""
    own = getattr(getattr(model, method), "__func__", None)
    return own is not getattr(keras.Model, method)


def has_own_step(model: keras.Model) -> bool:
    """Whether a model has its own steps, which need a single process."""
    return overrides(model, "train_step") or overrides(model, "test_step")


def refuse_test_step(model: keras.Model) -> None:
    """Raises `ValueError` if a model overrides `test_step`."""
    if overrides(model, "test_step"):
        raise ValueError(
            f"{type(model).__name__} overrides `test_step`, which only works "
            "in a single process: workers and replicas add up metrics "
            "themselves. Override `compute_metrics` instead, or use "
            "`Estimator.evaluate`."
        )


def check_sums(model: keras.Model) -> None:
    """Raises `ValueError` for losses that are not means over examples."""
    for loss in tf.nest.flatten(model.loss):
        reduction = getattr(loss, "reduction", "mean")
        if reduction not in ("mean", "sum_over_batch_size"):
            raise ValueError(
                f"Loss {loss.name!r} of model {model.name!r} has reduction="
                f"{reduction!r}, but between replicas a step applies the mean "
                "of the gradients of all examples. Use the default reduction="
                "'sum_over_batch_size', with another learning rate (for a sum) "
                "or with weights whose mean is 1 (for a weighted mean)."
            )


def refuse_new_variables(model: keras.Model, before: int) -> None:
    """Raises `ValueError` if there are more trainable variables than before."""
    if len(model.trainable_variables) > before:
        raise ValueError(
            f"The first step of model {model.name!r} creates variables. Build "
            "every layer in the model function: start the model with "
            "`keras.Input(...)` or call `layer.build(input_shape)`."
        )


def refuse_unlisted(
    model: keras.Model, handles: Sequence[tf.Tensor], assigns: bool = False
) -> None:
    """Raises `ValueError` for variables that are not weights of the model.

    `assigns`: whether any is assigned. A model or SavedModel that was created
    elsewhere and is only read is allowed: it is the same in every process.
    """
    for handle in handles:
        attribute = private_keras.attribute(model, handle)
        if attribute or assigns:
            raise ValueError(
                f"Model {model.name!r} uses {attribute or 'a variable'}, which "
                "is not one of its weights: evaluations, exports and the next "
                "run would not find its value. Create it with `add_weight` of "
                "a layer, or make it a constant. Keras 3 neither tracks nor "
                "trains a plain `tf.Variable`. Draw random numbers with "
                "`keras.random` and a `SeedGenerator`."
            )


def refuse_evaluation(model: keras.Model) -> None:
    """Raises `ValueError`, for a model whose step computes its own metrics."""
    raise ValueError(
        f"Model {model.name!r} overrides `train_step`, so its metrics are "
        "those of training. Evaluate its checkpoints with "
        "`Estimator.evaluate` instead."
    )


def checked_model(
    model: Any, element_spec: Any = None, targets: bool = True
) -> keras.Model:
    """Returns a model function's result; raises an error if it is unusable.

    A model without known inputs is built from the spec of a batch, or only from
    that of the features if there are no `targets`.
    """
    if not isinstance(model, keras.Model):
        raise TypeError(
            "The model function must return a `keras.Model`. Received: "
            f"{model!r} of type {type(model).__name__}."
        )
    if not model.compiled or model.optimizer is None:
        raise ValueError(
            f"Model {model.name!r} must be compiled with an optimizer and a "
            "loss. Call `model.compile(optimizer=..., loss=...)` in the model "
            "function."
        )
    # A program may compile each call's model with the same optimizer.
    own = {id(v) for v in model.variables}
    inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    others = private_keras.trained(inner) if inner.built else []
    if others and not any(id(v) in own for v in others):
        renew_optimizer(model)
    if model.run_eagerly:
        raise ValueError(
            f"Model {model.name!r} is compiled with run_eagerly=True, but "
            "tfdist runs many steps in one `tf.function`, which workers get "
            "as a graph. Leave it out. To debug a step, call "
            "`model.train_on_batch` with a few batches, or use `tf.print`."
        )
    for kind in ("train", "test", "predict"):
        if overrides(model, f"make_{kind}_function"):
            raise ValueError(
                f"{type(model).__name__} overrides `make_{kind}_function`, "
                f"which nothing calls. Override `{kind}_step` instead."
            )
    _check_loops(model)
    if element_spec is not None and overrides(model, "call"):
        _build(model, element_spec, targets)
    # An adversarial network has no `call`; only its parts are ever built.
    steps_itself = overrides(model, "train_step") and model.trainable_variables
    if not (model.built or steps_itself):
        raise ValueError(
            f"Model {model.name!r} has no variables and cannot be built: there "
            "is no batch, or no method `call`. Start it with `keras.Input(...)`"
            ", or call it on a batch in the model function."
        )
    private_keras.make_paths_unique(model)
    private_keras.read_statistics(model)
    return model


def _check_loops(model: keras.Model) -> None:
    """Warns of loops that a model overrides; raises if they prepare data."""
    loops = ("fit", "evaluate", "predict")
    own = ", ".join(f"`{name}`" for name in loops if overrides(model, name))
    if not own:
        return
    name = type(model).__name__
    if getattr(model, "preprocessor", None) is not None:  # As in KerasHub.
        raise ValueError(
            f"{name} preprocesses data in {own}, which tfdist does not call. "
            "Create it with preprocessor=None, and preprocess in the input "
            "function, e.g. `dataset.map(preprocessor)`."
        )
    if not hasattr(model, "preprocess_samples"):  # Else it only prepares data.
        _log.warning(
            "%s overrides %s, which tfdist does not call. If that changes the "
            "data or the model, do so in the input or model function.",
            name,
            own,
        )


def renew_optimizer(model: keras.Model) -> None:
    """Replaces a model's optimizer with a new one of the same config."""
    optimizer = model.optimizer
    try:
        model.optimizer = type(optimizer).from_config(optimizer.get_config())
    except (TypeError, NotImplementedError) as error:
        raise ValueError(
            f"Model {model.name!r} is compiled with a "
            f"{type(optimizer).__name__} that was created outside of the model "
            "function and has no config from which to create another one. "
            "Create it in the model function."
        ) from error


def _build(model: keras.Model, element_spec: Any, targets: bool) -> None:
    """Makes layers create their variables, as Keras' `fit` does."""
    own_step = overrides(model, "train_step")
    own_loss = overrides(model, "compute_loss")
    built = private_keras.is_built(model)
    if not built or getattr(model, "inputs", None) is None:
        # Bypasses Keras, which would track the contents.
        vars(model)[_ELEMENT_SPEC] = element_spec
    if built:
        return

    def run(batch: Any) -> None:
        x, y, _ = keras.utils.unpack_x_y_sample_weight(batch)
        # A loss may have layers too: the other tower, a projection.
        for training in (True, False) if targets else (False,):
            y_pred = model(x, **training_of(model.call, training))
            if targets and not own_step and (own_loss or y is not None):
                loss_of(model, batch, y_pred, training)

    try:
        trace_on_spec(run, element_spec)
    except AttributeError:
        # A loss may need gradients of variables, which have handles by now.
        trace_on_spec(run, element_spec)
    except Exception as error:
        if not own_step:
            raise
        # Its step may call it with other inputs, or only call its parts.
        if not private_keras.is_built(model, itself=False):
            raise ValueError(
                f"Model {model.name!r} cannot be built by calling it with the "
                "features of a batch. If its `train_step` calls it in another "
                "way, call it in that way in the model function."
            ) from error


def trace_on_spec(run: Callable[[Any], Any], element_spec: Any) -> None:
    """Traces `run` on a batch, so that it creates its variables.

    Nothing is executed; variables get their values when tracing is complete.
    """
    graph = tf.__internal__.FuncGraph("batch")
    with TapedScope([]), keras.SymbolicScope(), graph.as_default():
        batch = tf.nest.map_structure(
            lambda spec: tf.compat.v1.placeholder(spec.dtype, spec.shape),
            element_spec,
            expand_composites=True,
        )
        run(batch)


def element_spec_of(model: keras.Model) -> Any:
    """The spec of batches a model was built from; None if it has inputs."""
    return vars(model).get(_ELEMENT_SPEC)


def training_of(function: Callable, training: bool) -> dict[str, bool]:
    """The `training` argument for a model's method, if it takes one."""
    has = "training" in inspect.signature(function).parameters
    return {"training": training} if has else {}


def loss_of(
    model: keras.Model, batch: Any, y_pred: Any, training: bool
) -> tf.Tensor:
    """Returns the number of `compute_loss`; otherwise raises `ValueError`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    options = training_of(model.compute_loss, training)
    loss = model.compute_loss(x, y, y_pred, sample_weight, **options)
    shape = tf.convert_to_tensor(loss).shape
    if shape.rank and shape.num_elements() == 1:  # As in KerasHub's RQVAE.
        return tf.reshape(loss, [])
    if shape.rank:
        raise ValueError(
            f"The loss of model {model.name!r} must be a scalar. Received: a "
            f"loss of shape {shape}. Remove reduction=None of a loss, and "
            "reduce the result of `compute_loss` or `add_loss` to its mean."
        )
    return loss


def forward_pass(
    model: keras.Model,
    batch: Any,
    training: bool,
    aside: contextlib.AbstractContextManager | None = None,
) -> tuple[tf.Tensor, Mapping[str, Any]]:
    """Returns the loss and metric results; metrics are updated in `aside`."""
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
    y_pred = model(x, **training_of(model.call, training))
    loss = loss_of(model, batch, y_pred, training)
    with aside or contextlib.nullcontext():
        results = model.compute_metrics(x, y, y_pred, sample_weight)
    return loss, results


def gradients_of_loss(
    model: keras.Model,
    scope: TapedScope,
    batch: Any,
    layout: Layout,
    read: Parameters,
    tables: Sequence[Any],
) -> tuple[tf.Tensor, list[tf.Tensor | None]]:
    """The loss, and its gradients with respect to dense variables and rows."""
    values = read.values[: len(layout.dense)]
    for variable, value in zip(layout.dense, values, strict=True):
        scope.tape(variable, value)
    watched = [*values, *read.rows]
    with scope:
        with tf.GradientTape() as tape:
            tape.watch(watched)
            given = answers(layout, read, tables)
            with lookups.answered_by(given):
                loss, _ = forward_pass(
                    model, batch, True, tape.stop_recording()
                )
            given.check_all_given()
            scaled_loss = model.optimizer.scale_loss(loss)
        # Recomputation by `keras.remat` reads the answers again.
        with lookups.answered_by(given):
            found = tape.gradient(scaled_loss, watched)
    # Sums the slices of each row of `IndexedSlices`.
    return loss, [g if g is None else tf.convert_to_tensor(g) for g in found]


def on_own_thread(function: Callable, *args: Any) -> Any:
    """Calls a function on a new thread, without replicas or stopped tapes."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(function, *args).result()


def compiled_computation(
    function: Callable,
    model: keras.Model,
    element_spec: Any,
    *,
    has_tables: bool,
    has_replicas: bool,
    at_once: bool,
    keeps_seed: bool,
) -> Callable:
    """Returns `function`, compiled by XLA if the model wants it and XLA can.

    Unless it `keeps_seed`, `tf.random.set_seed` has no effect in it: each step
    on each worker would draw the same numbers.
    """

    def computation(*args: Any) -> Any:
        if not keeps_seed:
            tf.compat.v1.get_default_graph().seed = None
        return function(*args)

    reason = None
    waits = has_replicas and private_keras.is_synchronized(model)
    if waits or at_once:
        reason = "replicas wait for each other within it"
    elif has_tables:
        reason = "it reads a different number of rows in each step"
    elif any(s.dtype == tf.string for s in tf.nest.flatten(element_spec)):
        reason = "XLA does not support strings"
    if model.jit_compile and reason:
        _log.warning(
            'Model %r has jit_compile=True (which "auto" means if there is a '
            "GPU), but XLA cannot compile its steps: %s.",
            model.name,
            reason,
        )
    if waits or at_once:
        private_keras.keep_losses_per_thread(model)
    if waits:
        # A function must not wait for the other replicas of this process.
        return single_replica_view()(computation)
    compiles = (model.jit_compile and not reason) or None
    traced = tf.function(computation, autograph=False, jit_compile=compiles)

    def traced_alone(*args: Any) -> Any:
        # If Keras sees replicas, it divides its own losses by their number, but
        # not losses that a model computes itself.
        trace = traced.get_concrete_function
        return on_own_thread(trace, *specs(args))(*args)

    return traced_alone if has_replicas else traced


def specs(values: Any) -> Any:
    """Replaces tensors by their specs; keeps other values."""
    return tf.nest.map_structure(
        lambda t: tf.type_spec_from_value(t) if tf.is_tensor(t) else t, values
    )
