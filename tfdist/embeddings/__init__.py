"""Tables that are split over parameter servers, and those that grow there.

Read in this order: `layer` (the Keras layer), `lookups` (which rows a step
reads), `routing` (which server holds them); then of tables that grow `dynamic`
(the layer), `growing` (its shards), `index` (which slot is whose), `places`
(shards that are searched together), `admission` (which ids get a slot),
`initial` (what a row begins with), `filling` (many ids at once, from a
checkpoint), `static` (in a SavedModel).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
