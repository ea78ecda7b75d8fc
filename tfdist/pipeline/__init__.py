"""Layers of one model on different devices.

Read in this order: `model_parallel` (`Pipeline`), `stages` (layers and their
devices), `micro_batches` (both passes, and what a device does when).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
