from .device_setter import replica_device_setter as replica_device_setter
from .partitioners import fixed_size_partitioner as fixed_size_partitioner
from .partitioners import (
    min_max_variable_partitioner as min_max_variable_partitioner,
)
from .partitioners import row_slices as row_slices
from .partitioners import (
    variable_axis_size_partitioner as variable_axis_size_partitioner,
)
from .planner import plan as plan
from .planner import simulate as simulate
from .plans import Piece as Piece
from .plans import Plan as Plan
from .strategies import (
    GreedyLoadBalancingStrategy as GreedyLoadBalancingStrategy,
)
from .strategies import RandomStrategy as RandomStrategy
from .strategies import RoundRobinStrategy as RoundRobinStrategy
from .strategies import byte_size_load_fn as byte_size_load_fn
from .strategies import traffic_load_fn as traffic_load_fn
from .variables import VariableSpec as VariableSpec
from .variables import describe as describe
