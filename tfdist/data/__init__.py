"""Input pipelines that give each worker its share of the examples.

Read in this order: `readers` (the functions that users call), `reading`
(shuffles files and assigns them to workers), `record_files` (finds files),
`blocks` and `csv_records` (read records from files), `worker_context` (which
worker, which pass), `input_fns` (checks input functions), `fit_data` (the data
of `fit`), `input_wait` (how long steps wait for data), `data_service` (one
pass for all workers), `audit` (whether workers read different examples),
`statistics`, `tfds_inputs`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
