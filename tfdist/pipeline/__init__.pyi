from .model_parallel import Pipeline as Pipeline
from .model_parallel import bubble as bubble
from .stages import Stage as Stage
