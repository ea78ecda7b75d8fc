"""Tables are learned wherever a loss looks them up, as under `fit`."""

import keras
import lookup_models
import numpy as np
import pytest
import tensorflow as tf
from small_models import local_loop

from tfdist import PartitionedEmbedding


def trained(number):
    model = lookup_models.made(number, ours=True)
    loop, _ = local_loop(model, lookup_models.dataset(number))
    loop.run(lookup_models.STEPS)
    return lookup_models.weights(model)


def check_models(numbers):
    for number in numbers:
        for ours, theirs in zip(
            trained(number), lookup_models.fitted(number), strict=True
        ):
            np.testing.assert_allclose(
                ours,
                theirs,
                rtol=1e-4,
                atol=2e-5,
                err_msg=f"{number}: {lookup_models.drawn(number)}",
            )


@pytest.mark.parametrize("number", range(8))
def test_random_models_learn_what_fit_does(number):
    check_models([number])


@pytest.mark.slow
def test_many_random_models_learn_what_fit_does():
    check_models(range(100, 200))
