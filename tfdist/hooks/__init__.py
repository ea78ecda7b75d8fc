"""Hooks: code that runs between the steps of a session.

Read in this order: `session_run_hook` (the interface, and how it is called),
`basic`, `saving_hooks`, `summary_hooks` with `events`, `progress`,
`early_stopping`, `callbacks` (Keras' own) with `callback_checks`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
