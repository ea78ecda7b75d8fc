"""Ready-made linear and deep estimators, and layers, on feature columns.

Read in this order: `estimators`, `canned_model` (one Keras model of all their
parts), `feature_columns` with `vocabulary` (features become numbers), `layers`
(also for a model of one's own), `heads` (numbers become predictions, losses).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
