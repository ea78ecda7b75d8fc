"""Every loss of Keras that two numbers per example can have."""

import keras

from tests.cases import case, compiled

_OF_LOGITS = ["binary_crossentropy", "binary_focal_crossentropy", "hinge"]
_OF_NUMBERS = ["mse", "mae", "mape", "msle", "huber", "log_cosh", "poisson"]


def _add(loss, activation):
    @case(loss)
    def run(job):
        job.trains_as_fit(
            lambda: compiled(keras.layers.Dense(1, activation), loss=loss)
        )


for name in _OF_LOGITS:
    _add(name, "sigmoid")
for name in _OF_NUMBERS:
    _add(name, "softplus")
