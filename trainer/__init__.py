"""An example of a user's package: the flags, the data, the model."""

import os

from tfdist.launch import without_banner

# Before TensorFlow is imported, the only time its C++ side looks: what
# matters is raised as well. Whoever wants its log sets the variable.
if os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3") == "3":
    with without_banner():
        import tensorflow  # noqa: F401
