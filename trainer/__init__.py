"""An example of a user's package: the flags, the data, the model."""

import os

# Before TensorFlow is imported, the only time its C++ side looks: what
# matters is raised as well. Whoever wants its log sets the variable.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
