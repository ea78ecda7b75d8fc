"""Who is in the job, are they alive, and the `tf.distribute.Strategy` of it.

Read in this order: `spec` (the environment becomes a `Cluster`), `tf_config`
(its syntax), `probing` (who is up), `memory` (how much is left there),
`termination` (SIGTERM), `servers` (the tasks that only serve), `peers` (the
processes of an all-reduce job), `strategies`, `health` (a server that is
silent), `connections` (how one that is frozen is cut off), `size` (workers that
come and go).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
