"""Each worker's share of the examples.

Read in this order: `readers` (the functions users call), `reading` (files,
shuffled and dealt to workers), `worker_context` (which worker, which pass),
`input_fns` (what an `input_fn` may be), `data_service` (one pass for all),
`audit` (a proof that no two workers read the same), `statistics`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
