from . import advice as advice
from . import canned as canned
from . import checkpoint as checkpoint
from . import cluster as cluster
from . import data as data
from . import embeddings as embeddings
from . import estimator as estimator
from . import hooks as hooks
from . import launch as launch
from . import pipeline as pipeline
from . import placement as placement
from . import session as session
from . import training as training
from . import vertex as vertex
from .canned import DNNClassifier as DNNClassifier
from .canned import DNNLinearCombinedClassifier as DNNLinearCombinedClassifier
from .canned import DNNLinearCombinedRegressor as DNNLinearCombinedRegressor
from .canned import DNNRegressor as DNNRegressor
from .canned import LinearClassifier as LinearClassifier
from .canned import LinearRegressor as LinearRegressor
from .cluster import Cluster as Cluster
from .embeddings import DynamicEmbedding as DynamicEmbedding
from .embeddings import PartitionedEmbedding as PartitionedEmbedding
from .estimator import BestExporter as BestExporter
from .estimator import Estimator as Estimator
from .estimator import EvalSpec as EvalSpec
from .estimator import Exporter as Exporter
from .estimator import FinalExporter as FinalExporter
from .estimator import LatestExporter as LatestExporter
from .estimator import RunConfig as RunConfig
from .estimator import TrainSpec as TrainSpec
from .estimator import WarmStartSettings as WarmStartSettings
from .estimator import fit as fit
from .estimator import train_and_evaluate as train_and_evaluate
from .hooks import CheckpointSaverListener as CheckpointSaverListener
from .hooks import LoggingTensorHook as LoggingTensorHook
from .hooks import NanTensorHook as NanTensorHook
from .hooks import SessionRunHook as SessionRunHook
from .hooks import StopAtStepHook as StopAtStepHook
from .placement import (
    GreedyLoadBalancingStrategy as GreedyLoadBalancingStrategy,
)
from .placement import RandomStrategy as RandomStrategy
from .placement import RoundRobinStrategy as RoundRobinStrategy
from .placement import byte_size_load_fn as byte_size_load_fn
from .placement import fixed_size_partitioner as fixed_size_partitioner
from .placement import (
    min_max_variable_partitioner as min_max_variable_partitioner,
)
from .placement import replica_device_setter as replica_device_setter
from .placement import (
    variable_axis_size_partitioner as variable_axis_size_partitioner,
)
from .session import MonitoredTrainingSession as MonitoredTrainingSession
from .session import Trainable as Trainable
from .training import MultiOptimizer as MultiOptimizer
