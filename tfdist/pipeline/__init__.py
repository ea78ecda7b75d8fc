"""Pipeline parallelism: the layers of one model on different devices.

Read in this order: `model_parallel` (`Pipeline`), `stages` (layers and their
devices), `micro_batches` (both passes, and the schedule of each device).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
