from .finite import NonFiniteVariablesError as NonFiniteVariablesError
from .keras_step import KerasStep as KerasStep
from .multi_optimizer import MultiOptimizer as MultiOptimizer
from .staleness import MAX_STALENESS as MAX_STALENESS
from .staleness import PERCENTILES as PERCENTILES
from .step import ModelStep as ModelStep
