"""Each worker's share of the examples.

Read in this order: `readers` (the functions users call), `reading` (files,
shuffled and dealt to workers), `record_files` (which files), `blocks` and
`csv_records` (from files to records), `worker_context` (which worker, which
pass), `input_fns` (what an `input_fn` may be), `fit_data` (what `fit` takes),
`input_wait` (how long steps wait for it), `data_service` (one pass for all),
`audit` (a proof that no two workers read the same), `statistics`,
`tfds_inputs`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
