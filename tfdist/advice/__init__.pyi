from .chooser import Recommendation as Recommendation
from .chooser import choose_strategy as choose_strategy
from .cost_model import Estimate as Estimate
from .cost_model import estimates as estimates
from .machines import Machines as Machines
from .workload import Workload as Workload
