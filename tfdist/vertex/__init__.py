"""Job files for Vertex AI and Kubernetes.

Read in this order: `jobs` (a job becomes what the service is told), `tuning`
(many trials of one), `checks` (what the service would refuse), `job_file` (the
YAML, and the command that submits it), `command` (`python -m tfdist.vertex`),
`exports` (the model, where the service looks for it), `kubernetes`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
