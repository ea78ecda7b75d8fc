from .cluster import Cluster as Cluster
from .device_setter import replica_device_setter as replica_device_setter
from .embedding import PartitionedEmbedding as PartitionedEmbedding
from .estimator import Estimator as Estimator
from .estimator import train_and_evaluate as train_and_evaluate
from .exporters import Exporter as Exporter
from .exporters import FinalExporter as FinalExporter
from .exporters import LatestExporter as LatestExporter
from .hooks import CheckpointSaverListener as CheckpointSaverListener
from .hooks import SecondOrStepTimer as SecondOrStepTimer
from .hooks import SessionRunHook as SessionRunHook
from .multi_optimizer import MultiOptimizer as MultiOptimizer
from .partition import fixed_size_partitioner as fixed_size_partitioner
from .partition import (
    min_max_variable_partitioner as min_max_variable_partitioner,
)
from .partition import (
    variable_axis_size_partitioner as variable_axis_size_partitioner,
)
from .placement import (
    GreedyLoadBalancingStrategy as GreedyLoadBalancingStrategy,
)
from .placement import RandomStrategy as RandomStrategy
from .placement import RoundRobinStrategy as RoundRobinStrategy
from .placement import byte_size_load_fn as byte_size_load_fn
from .specs import EvalSpec as EvalSpec
from .specs import RunConfig as RunConfig
from .specs import TrainSpec as TrainSpec
