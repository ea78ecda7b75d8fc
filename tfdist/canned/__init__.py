"""Ready-made linear and deep estimators and layers for feature columns.

Read in this order: `estimators`, `canned_model` (the Keras model behind them),
`feature_columns` and `vocabulary` (from features to numbers), `layers` (also
usable in your own models), `heads` (from logits to predictions and losses).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
