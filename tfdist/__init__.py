"""TensorFlow's distributed training toolkit for Keras 3.

At the top are the names that users of TF1 and Keras type first; `__init__.pyi`
lists them. The others are in the packages ("wings") that `tfdist/README.md`
maps. Everything is imported when it is first used, so that the launcher starts
without TensorFlow.
"""

import importlib
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """A listed name, or one that was at the top before there were wings."""
    if name not in __all__ and not name.startswith("_"):
        for wing in ("hooks", "data", "estimator", "pipeline", "advice"):
            module = importlib.import_module(f"tfdist.{wing}")
            if name in module.__all__:
                return getattr(module, name)
        if name == "testing":
            return importlib.import_module("tfdist.launch.testing")
    return _listed(name)
