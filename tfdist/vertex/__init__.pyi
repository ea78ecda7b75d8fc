from .checks import problems_of_job as problems_of_job
from .exports import check_export_dir as check_export_dir
from .exports import copy_export as copy_export
from .jobs import Job as Job
from .jobs import Machine as Machine
from .tuning import Tuning as Tuning
