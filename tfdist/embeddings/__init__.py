"""Tables that are split over parameter servers.

Read in this order: `layer` (the Keras layer), `lookups` (which rows a step
reads), `routing` (which server holds them).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
