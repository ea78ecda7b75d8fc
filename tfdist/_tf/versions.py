"""Public classes that the older of the supported versions lack.

In those, nothing is an instance of them.
"""

from typing import Any

import keras
import tensorflow as tf


def _newer(module: Any, name: str) -> Any:
    return getattr(module, name, type(name, (), {}))


# A batch with targets or weights that are None is refused there.
NoneTensorSpec = _newer(tf, "NoneTensorSpec")
OrbaxCheckpoint = _newer(keras.callbacks, "OrbaxCheckpoint")
KerasMultiOptimizer = _newer(keras.optimizers, "MultiOptimizer")
ScheduleFreeAdamW = _newer(keras.optimizers, "ScheduleFreeAdamW")
