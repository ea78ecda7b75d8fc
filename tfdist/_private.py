"""The private TensorFlow and Keras names that tfdist cannot do without.

Each has its reason beside it and a canary in `tests/test_private.py`, which
fails loudly when a new version changes it; `setup.py` pins both packages.
"""

from __future__ import annotations

from keras.src.utils import naming

SEED_STATE_NAME = "seed_generator_state"
"""Name of the variable in which a `keras.random.SeedGenerator` counts.

Keras marks it in no other way. A step gives each generator a seed that
belongs to that step instead of this shared counter.
"""


def reset_object_names() -> None:
    """Restarts Keras' numbering of unnamed layers (`dense`, `dense_1`, ...).

    A model function called twice in one process (the training model and the
    copy that is evaluated) must make variables of the same paths, since
    checkpoints name variables by their path. The public
    `keras.utils.clear_session()` does this too, but also drops the user's
    dtype policy and other settings.
    """
    naming.reset_uids()
