"""Embedding tables split over parameter servers, of fixed or growing size.

Read in this order: `layer` (the Keras layer), `lookups` (the rows that a step
reads), `routing` (the servers that hold them); then, for growing tables,
`dynamic` (the layer), `growing` (its shards), `index` (the slot of each id),
`places` (shards that are searched together), `admission` (which ids get a
slot), `initial` (initial values of rows), `filling` (inserting many ids from a
checkpoint), `static` (tables in a SavedModel).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
