"""A local cluster of real processes.

Read in this order: `command` (`python -m tfdist.launch`), `supervisor`,
`processes`, `testing` (a cluster under test: kill, freeze, cut off), `faults`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
