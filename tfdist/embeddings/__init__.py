"""Tables that are split over parameter servers, and those that grow there.

Read in this order: `layer` (the Keras layer), `lookups` (which rows a step
reads), `routing` (which server holds them); then of tables that grow `dynamic`
(the layer), `growing` (a shard of it), `index` (which slot is whose),
`admission` (which ids get one), `initial` (what a row begins with), `placing`
(many at once, from a checkpoint), `static` (in a SavedModel).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
