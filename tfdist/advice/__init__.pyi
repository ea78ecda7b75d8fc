from .chooser import Recommendation as Recommendation
from .chooser import choose_strategy as choose_strategy
from .estimate import Estimate as Estimate
from .estimate import estimates as estimates
from .machines import Machines as Machines
from .workload import Workload as Workload
from .workload import measure as measure
