"""Recommends a strategy for a model and its machines; lists migration steps.

Read in this order: `workload` (what a step needs), `machines`, `cost_formulas`,
`estimate` (what each strategy would cost), `chooser` (the recommendation),
`command` (`python -m tfdist.advice`); `migration` (`tfdist migrate`).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
