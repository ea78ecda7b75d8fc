"""An example of a user's package: flags, data and model."""

import os

from tfdist.launch import without_banner

# TensorFlow's C++ code reads the variable only at import. Important messages
# are raised as exceptions as well; set the variable to see the full log.
if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "3":
    with without_banner():
        import tensorflow  # noqa: F401
