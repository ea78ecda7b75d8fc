"""Public classes that older supported versions lack.

In such a version, a class is a placeholder without instances.
"""

from typing import Any

import keras


def _newer(module: Any, name: str) -> Any:
    return getattr(module, name, type(name, (), {}))


OrbaxCheckpoint = _newer(keras.callbacks, "OrbaxCheckpoint")
KerasMultiOptimizer = _newer(keras.optimizers, "MultiOptimizer")
ScheduleFreeAdamW = _newer(keras.optimizers, "ScheduleFreeAdamW")
