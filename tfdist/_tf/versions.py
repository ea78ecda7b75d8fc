"""Public classes that the older of the supported versions lack.

In those, nothing is an instance of them.
"""

from typing import Any

import keras


def _newer(module: Any, name: str) -> Any:
    return getattr(module, name, type(name, (), {}))


OrbaxCheckpoint = _newer(keras.callbacks, "OrbaxCheckpoint")
KerasMultiOptimizer = _newer(keras.optimizers, "MultiOptimizer")
ScheduleFreeAdamW = _newer(keras.optimizers, "ScheduleFreeAdamW")
