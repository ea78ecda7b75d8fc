"""`Estimator` and `train_and_evaluate`: from model function to served model.

Read in this order: `estimator`, `run_config` and `specs` (the configuration),
`building` (the step and loop), `chief_hooks`, `training`
(`train_and_evaluate`), `fitting` (`fit`) with `fit_history`, `evaluator` with
`evaluation` and `results`, `exporters` with `saved_models` and `serving`,
`predictions`, `on_workers`, `warm_start`, `tuning`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
