"""Who is in the job, are they alive, and the `tf.distribute.Strategy` of it.

Read in this order: `spec` (the environment becomes a `Cluster`), `tf_config`
(its syntax), `probing` (who is up), `memory` (how much is left there),
`termination` (SIGTERM), `servers` (the tasks that only serve), `size` (workers
that come and go), `meeting` (the processes of an all-reduce job find each
other), `peers` (and keep in step), `strategies`, `health` (a server that is
silent), `connections` (how one that is frozen is cut off).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
