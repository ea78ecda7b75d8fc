from .checkpoints import Checkpoints as Checkpoints
from .checkpoints import latest as latest
from .checkpoints import load_variable as load_variable
from .checkpoints import restore as restore
from .checkpoints import step_of as step_of
from .estimator_checkpoint import (
    read_estimator_checkpoint as read_estimator_checkpoint,
)
from .names import load_rows as load_rows
from .names import named_variables as named_variables
