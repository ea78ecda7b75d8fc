"""The signatures of exported SavedModels, the same for every model.

    signature       takes                 gives             its API
    serve           tensors, by name      all outputs       predict
    predict         examples: (batch,)    all outputs       predict
    classification  inputs: (batch,)      classes, scores   classify
    regression      inputs: (batch,)      outputs           regress
    serving_default is the first there is of classification, regression, serve

A ragged or sparse tensor `x` is passed as its components: `x`, `x_1`, `x_2`.
`examples` and `inputs` are strings: serialized `tf.Example`s. The names are
those of `tf.estimator`, except `serve`, which is Keras'; the APIs are those of
TensorFlow Serving.
"""

from __future__ import annotations

import contextlib
import dataclasses
import keyword
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from inspect import signature
from typing import Any

import keras
import tensorflow as tf

from tfdist._tf.private_keras import without_default_signatures
from tfdist.embeddings.lookups import answered_by
from tfdist.embeddings.static import StaticTables
from tfdist.training.compiled_model import element_spec_of

_log = logging.getLogger(__name__)

Tensors = Mapping[str, Any]

_METHODS = {
    "classification": tf.compat.v1.saved_model.CLASSIFY_METHOD_NAME,
    "regression": tf.compat.v1.saved_model.REGRESS_METHOD_NAME,
}


@dataclasses.dataclass(frozen=True)
class Serving:
    """Describes how a model is served.

    Create it from a Keras model by `Serving.of`, or directly to specify sparse
    features, defaults of missing features, or the outputs of the classify and
    regress APIs.

    Attributes:
        model: The model with the variables and tables that `predict` uses.
        inputs: Maps names to `tf.TypeSpec`s with a batch dimension. `serve`
            takes these names, with "_" for characters TensorFlow disallows.
        predict: Maps tensors by name to outputs by name.
        examples: The features for `tf.io.parse_example`, with the keys of
            `inputs`. None: `tf.Example`s cannot be parsed, and the signatures
            that take them are omitted.
        classification: Names of two outputs, string `(batch, n)` and float32
            `(batch, n)`: the classes and their scores.
        regression: Name of an output, float32 `(batch,)` or `(batch, 1)`.

    Raises:
        ValueError: `classification` or `regression` without `examples`.
    """

    model: keras.Model
    inputs: Mapping[str, tf.TypeSpec]
    predict: Callable[[Tensors], Tensors]
    examples: Mapping[str, Any] | None = None
    classification: tuple[str, str] | None = None
    regression: str | None = None

    def __post_init__(self) -> None:
        if (self.classification or self.regression) and not self.examples:
            raise ValueError(
                "Arguments `classification` and `regression` need `examples`: "
                "TensorFlow Serving's classify and regress APIs send "
                "serialized tf.Examples."
            )

    @classmethod
    def of(cls, model: keras.Model, **kwargs: Any) -> Serving:
        """Creates a `Serving` from a Keras model's inputs and outputs.

        Outputs are named by the keys of a dictionary (in a dictionary within
        it, `outer_inner`), or `output_0` and so on, as in Keras. `kwargs`
        override the attributes.

        >>> x = keras.Input([2], name="x")
        >>> model = keras.Model(x, {"p": keras.layers.Dense(1)(x)})
        >>> Serving.of(model, regression="p").examples
        {'x': FixedLenFeature(shape=[2], dtype=tf.float32, default_value=None)}

        Raises:
            ValueError: the inputs of the model are unknown.
        """
        structure = inputs_of(model)
        if structure is None:
            raise ValueError(
                f"The inputs of model {model.name!r} are unknown: it is neither"
                " functional nor sequential, nor built by an Estimator."
            )
        inputs = _named(structure, next(iter(signature(model.call).parameters)))

        def predict(tensors: Tensors) -> Tensors:
            flat = [tensors[name] for name in inputs]
            values = keras.tree.pack_sequence_as(structure, flat)
            outputs = model(values, training=False)
            if isinstance(outputs, Mapping):
                by_path = keras.tree.flatten_with_path(outputs)
                named = {"_".join(map(str, path)): y for path, y in by_path}
                _check_names("outputs", named, [path for path, _ in by_path])
                return named
            flat = tf.nest.flatten(outputs)
            return {f"output_{i}": value for i, value in enumerate(flat)}

        kwargs.setdefault("predict", predict)
        kwargs.setdefault("examples", _feature_spec(inputs))
        return cls(**{"model": model, "inputs": inputs, **kwargs})


def inputs_of(model: keras.Model) -> Any:
    """Returns a model's inputs in their structure; None if unknown."""
    spec = element_spec_of(model)
    is_sequential = isinstance(model, keras.Sequential)
    # For one built from a batch, Keras reports floats, whatever the dtypes.
    if spec is None or not is_sequential:
        with contextlib.suppress(AttributeError, ValueError):
            return model.inputs[0] if is_sequential else model.input
    return spec and keras.utils.unpack_x_y_sample_weight(spec)[0]


def _named(structure: Any, argument: str) -> dict[str, tf.TypeSpec]:
    """Returns the specs of inputs by name, in order.

    A name is the key in a dictionary, Keras' name, or the argument of `call`.
    """
    inputs = {}
    by_path = keras.tree.flatten_with_path(structure)
    for path, part in by_path:
        names = [str(step) for step in path]
        if not isinstance(structure, dict):
            names.insert(0, argument)
            if isinstance(part, keras.KerasTensor):
                names = [part.name]
        name, shape = "_".join(names), [None, *part.shape[1:]]
        if getattr(part, "ragged", isinstance(part, tf.RaggedTensorSpec)):
            rank, splits = part.ragged_rank or 1, part.row_splits_dtype
            inputs[name] = tf.RaggedTensorSpec(
                shape, part.dtype, rank, splits or tf.int64
            )
        elif getattr(part, "sparse", isinstance(part, tf.SparseTensorSpec)):
            inputs[name] = tf.SparseTensorSpec(shape, part.dtype)
        else:
            inputs[name] = tf.TensorSpec(shape, part.dtype, name)
    _check_names("inputs", inputs, [path for path, _ in by_path])
    return inputs


def _check_names(what: str, names: Collection[str], keys: Sequence) -> None:
    """Raises ValueError if several keys of inputs or outputs make one name."""
    if len(names) < len(keys):
        raise ValueError(
            f"Two {what} of the model have one name in its signatures. What is "
            "in a dictionary within a dictionary is named `outer_inner`, and "
            f"has `_` for characters TensorFlow disallows. Received: {keys}."
        )


def _feature_spec(inputs: Mapping[str, tf.TypeSpec]) -> dict | None:
    """Returns features to parse `inputs` from `tf.Example`s, all required.

    None if a dimension other than the first two is unknown.
    """
    spec: dict[str, Any] = {}
    for name, tensor in inputs.items():
        shape, dtype = tensor.shape.as_list()[1:], tensor.dtype
        if dtype.is_floating:
            dtype = tf.float32
        elif dtype != tf.string:
            dtype = tf.int64
        if None in shape[1:]:
            return None
        if isinstance(tensor, tf.RaggedTensorSpec):
            spec[name] = tf.io.RaggedFeature(
                dtype, row_splits_dtype=tensor.row_splits_dtype
            )
        elif isinstance(tensor, tf.SparseTensorSpec):
            spec[name] = tf.io.VarLenFeature(dtype)
        elif None in shape:
            spec[name] = tf.io.FixedLenSequenceFeature(
                shape[1:], dtype, allow_missing=True
            )
        else:
            spec[name] = tf.io.FixedLenFeature(shape, dtype)
    return spec


def write(serving: Serving, path: str) -> None:
    """Writes a SavedModel that TensorFlow Serving's C++ loader reads.

    The C++ loader cannot load `tf.saved_model.save(keras_model)`. Only the rows
    in use of a `DynamicEmbedding` are written.
    """
    endpoints = _endpoints(serving)
    archive = keras.export.ExportArchive()
    archive.track(serving.model)
    tables = StaticTables(serving.model.variables)
    for kind in ("variables", "trainable_variables", "non_trainable_variables"):
        variables = getattr(archive, kind)
        kept = [v for v in variables if id(v) not in tables.replaced]
        archive.add_variable_collection(kind, kept)
    # TensorFlow also traces functions when it writes.
    with answered_by(tables), without_default_signatures():
        for name, (function, spec) in endpoints.items():
            # Keras itself does not accept specs of ragged or sparse tensors.
            if isinstance(spec, dict) and _need_keywords(spec):
                traced = tf.function(_by_keyword(function), autograph=False)
                traced.get_concrete_function(**spec)
            else:
                traced = tf.function(function, [spec], autograph=False)
                traced.get_concrete_function()
            archive.add_endpoint(name, traced)
        # Keras makes the first endpoint `serving_default`.
        archive.write_out(path, verbose=False)
    methods = {name: _METHODS[name] for name in endpoints if name in _METHODS}
    if methods:
        # `tf.saved_model.save` marks every signature as a predict signature.
        methods["serving_default"] = next(iter(methods.values()))
        utils = tf.compat.v1.saved_model.signature_def_utils
        updater = utils.MethodNameUpdater(path)
        for name, method in methods.items():
            updater.replace_method_name(name, method, tags="serve")
        updater.save()


def _need_keywords(specs: Mapping[str, tf.TypeSpec]) -> bool:
    """Whether composite tensors need keyword arguments to keep their names."""
    dense = all(isinstance(spec, tf.TensorSpec) for spec in specs.values())
    names = all(n.isidentifier() and not keyword.iskeyword(n) for n in specs)
    return names and not dense


def _by_keyword(function: Callable) -> Callable[..., Any]:
    return lambda **tensors: function(tensors)


def _endpoints(serving: Serving) -> dict[str, tuple[Callable, Any]]:
    """Returns functions and input specs by name, the default one first."""
    endpoints: dict[str, tuple[Callable, Any]] = {}
    # Each is traced once, however many signatures use it.
    serve = tf.function(
        lambda tensors: dict(serving.predict(tensors)), autograph=False
    )
    predict = tf.function(
        lambda strings: serve(_parse(serving, strings)), autograph=False
    )

    def add(name: str, **outputs: str) -> None:
        def function(strings: tf.Tensor) -> Tensors:
            predicted = predict(strings)
            return {key: predicted[name] for key, name in outputs.items()}

        endpoints[name] = function, tf.TensorSpec([None], tf.string, "inputs")

    if serving.classification:
        classes, scores = serving.classification
        add("classification", classes=classes, scores=scores)
    if serving.regression:
        add("regression", outputs=serving.regression)
    inputs = {n: _argument(n, spec) for n, spec in serving.inputs.items()}
    names = {getattr(spec, "name", None) or n for n, spec in inputs.items()}
    _check_names("inputs", names, [*inputs])
    endpoints["serve"] = serve, inputs
    if serving.examples:
        strings = tf.TensorSpec([None], tf.string, "examples")
        endpoints["predict"] = predict, strings
    else:
        reason = "its inputs have unknown dimensions, or `examples` is None"
        warn_of_no_examples(serving.model, reason)
    return endpoints


def _argument(name: str, spec: tf.TypeSpec) -> tf.TypeSpec:
    """Returns an input's spec with a name that a signature may use.

    Signatures allow letters, digits and few other characters.
    """
    if not isinstance(spec, tf.TensorSpec):
        return spec
    name = re.sub(r"[^\w./-]", "_", spec.name or name, flags=re.ASCII)
    name = name if re.match("[A-Za-z0-9.]", name) else f"input{name}"
    name = f"input_{name}" if keyword.iskeyword(name) else name
    return tf.TensorSpec(spec.shape, spec.dtype, name)


def warn_of_no_examples(model: keras.Model, reason: str) -> None:
    """Warns that the `tf.Example` signatures are missing, and why."""
    _log.warning(
        "The export of model %r gets no signature for tf.Examples: %s. To add "
        "one, pass a `serving_model_fn` that returns a tfdist.Serving with "
        "`examples`.",
        model.name,
        reason,
    )


def _parse(serving: Serving, strings: tf.Tensor) -> Tensors:
    """Parses serialized examples into features of the model's dtypes."""
    assert serving.examples is not None  # Else no signature takes strings.
    parsed = tf.io.parse_example(strings, dict(serving.examples))
    inputs = serving.inputs
    return {n: tf.cast(x, inputs[n].dtype) for n, x in parsed.items()}
