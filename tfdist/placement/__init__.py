"""Which parameter server holds a variable.

Read in this order: `variables` (a description, before anything exists),
`strategies` (description to server), `device_setter` (TF1's own entry),
`partitioners`, `plans`, `planner` and `packing` (all variables at once),
`scope` (where it takes effect).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
