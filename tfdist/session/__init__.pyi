from .monitored_session import (
    MonitoredTrainingSession as MonitoredTrainingSession,
)
from .monitored_session import Trainable as Trainable
