from .monitored_session import (
    MonitoredTrainingSession as MonitoredTrainingSession,
)
from .recoverable import Trainable as Trainable
