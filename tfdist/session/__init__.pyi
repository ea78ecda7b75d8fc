from .monitored_session import (
    MonitoredTrainingSession as MonitoredTrainingSession,
)
from .trainable import Trainable as Trainable
