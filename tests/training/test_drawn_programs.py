"""More of the programs of `tests/cases/drawn.py`, in one process."""

import keras
import pytest

from tests.cases import Job
from tests.cases.drawn import FEW, check

MANY = 200


@pytest.mark.slow
@pytest.mark.soak
def test_many_train_as_fit(tmp_path):
    for seed in range(FEW, MANY):
        check(seed, Job("one process", tmp_path / str(seed)))
        keras.backend.clear_session()
