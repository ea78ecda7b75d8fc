"""`MonitoredTrainingSession`: steps that go on when a process dies.

Read in this order: `monitored_session` (the session, and what each failure
costs), `recovery` (what is done about which error).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
