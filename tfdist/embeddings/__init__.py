"""Embedding tables sharded over parameter servers, of fixed size or growing.

Read in this order: `layer` (the Keras layer), `lookups` (which rows a step
reads), `routing` (which server holds them); then, for growing tables, `dynamic`
(the layer), `growing` (its shards), `index` (the slot of each id), `places`
(shards searched together), `admission` (which ids get a slot), `initial`
(initial rows), `filling` (many ids at once), `static` (SavedModels).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
