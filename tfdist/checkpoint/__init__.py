"""Checkpoints of variables by name, for clusters of any shape.

Read in this order: `names` (a name per variable, independent of its shards),
`held` (values of one moment, while steps continue), `checkpoints` (saved in
slices by the servers that hold them, restored into any number of slices),
`rehash` (a growing table with another capacity), `estimator_checkpoint` (reads
checkpoints of TF1 and of TF 2.15's Estimator).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
