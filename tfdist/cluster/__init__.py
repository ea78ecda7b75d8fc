"""Who is in the job, are they alive, and the `tf.distribute.Strategy` of it.

Read in this order: `spec` (the environment becomes a `Cluster`), `tf_config`
(its syntax), `servers` (the tasks that only serve), `probing` (who is up),
`strategies`, `health` (a server that is silent), `connections` (how one that is
frozen is cut off), `peers` (the processes of an all-reduce job), `current` (the
cluster of a `RunConfig`), `termination` (SIGTERM), `time_limit`, `tpu`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
