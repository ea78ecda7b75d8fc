"""Variables by name, whatever the cluster.

Read in this order: `names` (one name a variable, whatever its shards), `held`
(values of one moment, while steps go on), `checkpoints` (saved in slices, by
those who hold them; restored into any number), `rehash` (a growing table in
another capacity), `estimator_checkpoint` (those that TF 2.15's Estimator
wrote).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
