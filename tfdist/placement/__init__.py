"""Placement of variables on parameter servers.

Read in this order: `variables` (describes variables before they exist),
`strategies` (maps each description to a server), `device_setter` (TF1's API),
`partitioners`, `plans`, `planner` and `packing` (place all variables at once),
`scope` (applies a placement).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
