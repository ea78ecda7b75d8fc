"""The training step, its messages to parameter servers, and training loops.

Read in this order: `step` (turns a compiled model into a function), `layout`
(which server holds what), `exchange` (parameters out, gradients back) with
`messages`; `optimizers` with `slots` and `kernels` (the update, on the server),
`multi_optimizer`; `loop`, `coordinated_loop` with `workers`, `replicated_loop`
with `replicas`, `synchronous_loop` with `aggregation`.

Details of a step: `passes` and `forward` (the graphs of a model, and which part
of them computes ids before lookups), `compiled_model`, `own_step` and
`keras_step` (a model's own `train_step`), `metrics`, `optimizer_checks`,
`counters`, `updates`, `fence`, `staleness`; `finite` (before a checkpoint).
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
