from .checks import problems_of_job as problems_of_job
from .checks import problems_of_tuning_job as problems_of_tuning_job
from .jobs import Job as Job
from .jobs import Machine as Machine
from .jobs import Tuning as Tuning
