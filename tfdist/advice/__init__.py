"""Which strategy suits a model and its machines, and why.

Read in this order: `chooser` (the recommendation), `cost_model` (what each
strategy would cost) with `cost_formulas`, `machines`, `workload` (what the
model asks), `reasons`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
