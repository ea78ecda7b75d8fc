from .building import Trainable as Trainable
from .monitored_session import (
    MonitoredTrainingSession as MonitoredTrainingSession,
)
