"""Job files for Vertex AI and Kubernetes.

Read in this order: `jobs` (from a job to the service's spec), `tuning` (many
trials of a job), `checks` (what the service would reject), `job_file` (the YAML
and the command that submits it), `command` (`python -m tfdist.vertex`),
`exports` (copies the model to where Vertex AI expects it), `kubernetes`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
