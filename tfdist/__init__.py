"""TensorFlow's distributed training toolkit for Keras 3.

The public names are listed, one a line, in `__init__.pyi`; each is imported
when it is first used, so that the launcher starts without TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
