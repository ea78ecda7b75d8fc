"""TensorFlow's distributed training toolkit for Keras 3.

The top level exports the names that users of TF1 and Keras need first;
`__init__.pyi` lists them. All other names are in the subpackages ("wings") that
`tfdist/README.md` describes. Names are imported on first use, so that the
launcher starts without importing TensorFlow.
"""

import importlib
from typing import Any

import lazy_loader

__version__ = "0.1.0"

_listed, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> Any:
    """Returns a listed name, or one exported here before the wings existed."""
    if name not in __all__ and not name.startswith("_"):
        for wing in ("hooks", "data", "estimator", "pipeline", "advice"):
            module = importlib.import_module(f"tfdist.{wing}")
            if name in module.__all__:
                return getattr(module, name)
        if name == "testing":
            return importlib.import_module("tfdist.launch.testing")
    try:
        return _listed(name)
    except AttributeError:
        raise AttributeError(
            f"Module 'tfdist' has no attribute {name!r}. The command `tfdist "
            "migrate` names the replacement of each symbol of TF 1."
        ) from None
