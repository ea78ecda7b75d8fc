"""The tasks of a job, their health and the job's `tf.distribute.Strategy`.

Read in this order: `spec` (turns the environment into a `Cluster`), `tf_config`
(the syntax of its variables), `probing` (which tasks are up), `memory` (how
much memory they have left), `termination` (SIGTERM), `servers` (the tasks that
only serve), `size` (adding and removing workers), `meeting` (rendezvous of an
all-reduce job), `peers` (keeping its processes in step), `strategies`, `health`
(detecting silent tasks), `connections` (cutting off frozen ones).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
