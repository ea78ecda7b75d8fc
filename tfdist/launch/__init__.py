"""A local cluster of real processes.

Read in this order: `command` (`python -m tfdist.launch`), `options` (its
flags), `supervisor` (the parent of the tasks), `processes` (a task),
`forkserver` (forks the tasks), `banner`, `network` (of the tasks), `resize`
(`python -m tfdist resize`); `testing` (a cluster under test: kill, freeze, cut
off), `faults`, `client`, `injector` (its supervisor, in a separate process).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
