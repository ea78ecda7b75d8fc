"""Which strategy suits a model and its machines, and why.

Read in this order: `chooser` (the recommendation), `estimate` (what each
strategy would cost) with `cost_formulas`, `workload` (what a step needs) and
`measurement`, `machines`, `command` (`python -m tfdist.advice`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
