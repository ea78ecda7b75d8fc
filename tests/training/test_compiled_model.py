import keras
import pytest
import tensorflow as tf

from tests.cases.models import Mlp, TwoTower, compiled
from tfdist._tf.private_keras import reset_object_names
from tfdist.placement.variables import describe
from tfdist.training.compiled_model import (
    checked_model,
    element_spec_of,
    trace_on_spec,
)

SPEC = (tf.TensorSpec([None, 4]), tf.TensorSpec([None, 1]))


def test_a_subclass_is_built_of_a_spec():
    reset_object_names()
    model = checked_model(compiled(Mlp()), SPEC)
    assert [v.path for v in model.weights] == [
        "mlp/dense/kernel",
        "mlp/dense/bias",
        "mlp/dense_1/kernel",
        "mlp/dense_1/bias",
    ]
    assert element_spec_of(model) == SPEC


def test_a_model_that_knows_its_inputs_stays_as_it_is():
    inputs = keras.Input([4])
    model = compiled(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    assert element_spec_of(checked_model(model, SPEC)) is None


def test_layers_that_only_the_loss_calls():
    features = {
        "user": tf.TensorSpec([None], tf.string),
        "item": tf.TensorSpec([None], tf.int64),
        "rating": tf.TensorSpec([None, 1]),
    }

    def built(targets):
        model = TwoTower(keras.layers.Embedding)
        return checked_model(compiled(model, loss=None), (features,), targets)

    assert len(built(True).weights) - len(built(False).weights) == 4


def test_a_subclass_is_described_without_memory():
    class Large(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = keras.layers.Embedding(1_000_000_000, 20)

        def call(self, ids):
            return self.table(ids)

    spec = (tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 20]))
    (table,) = describe(lambda: checked_model(compiled(Large()), spec))
    assert table.name == "large/embedding/embeddings"


def test_what_is_looked_at_is_not_run():
    counter = keras.Variable(0.0)
    seen = []

    def run(batch):
        counter.assign_add(1.0)
        seen.append(batch)

    trace_on_spec(run, {"ids": tf.RaggedTensorSpec([None, None], tf.int64)})
    assert float(counter) == 0.0
    assert isinstance(seen[0]["ids"], tf.RaggedTensor)


class Preprocessing(keras.Sequential):
    """As tasks of KerasHub: `fit` prepares the data by a preprocessor."""

    preprocessor = None

    def fit(self, x, *args, **kwargs):
        return super().fit(self.preprocessor(x), *args, **kwargs)


def test_loops_of_a_model_are_not_called(caplog):
    model = compiled(Preprocessing([keras.Input([4]), keras.layers.Dense(1)]))
    checked_model(model)
    assert "Preprocessing overrides `fit`, which" in caplog.text
    model.preprocessor = keras.layers.Rescaling(2.0)
    with pytest.raises(ValueError, match=r"in `fit`, .* preprocessor=None"):
        checked_model(model)
