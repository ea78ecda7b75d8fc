from .callbacks import KerasCallbackHook as KerasCallbackHook
from .canned import DNNClassifier as DNNClassifier
from .canned import (
    DNNLinearCombinedClassifier as DNNLinearCombinedClassifier,
)
from .canned import (
    DNNLinearCombinedRegressor as DNNLinearCombinedRegressor,
)
from .canned import DNNRegressor as DNNRegressor
from .canned import LinearClassifier as LinearClassifier
from .canned import LinearRegressor as LinearRegressor
from .chooser import Recommendation as Recommendation
from .chooser import choose_strategy as choose_strategy
from .cluster import Cluster as Cluster
from .data_service import one_pass as one_pass
from .device_setter import replica_device_setter as replica_device_setter
from .early_stopping import make_early_stopping_hook as make_early_stopping_hook
from .early_stopping import stop_if_higher_hook as stop_if_higher_hook
from .early_stopping import stop_if_lower_hook as stop_if_lower_hook
from .early_stopping import stop_if_no_decrease_hook as stop_if_no_decrease_hook
from .early_stopping import stop_if_no_increase_hook as stop_if_no_increase_hook
from .embedding import PartitionedEmbedding as PartitionedEmbedding
from .estimator import Estimator as Estimator
from .exporters import BestExporter as BestExporter
from .exporters import Exporter as Exporter
from .exporters import FinalExporter as FinalExporter
from .exporters import LatestExporter as LatestExporter
from .hooks import FinalOpsHook as FinalOpsHook
from .hooks import GlobalStepWaiterHook as GlobalStepWaiterHook
from .hooks import LoggingTensorHook as LoggingTensorHook
from .hooks import NanLossDuringTrainingError as NanLossDuringTrainingError
from .hooks import NanTensorHook as NanTensorHook
from .hooks import StopAtStepHook as StopAtStepHook
from .inputs import ReadOptions as ReadOptions
from .inputs import read_csv as read_csv
from .inputs import read_text as read_text
from .inputs import read_tfrecords as read_tfrecords
from .machines import Machines as Machines
from .model_parallel import Pipeline as Pipeline
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
from .progress import ProgressHook as ProgressHook
from .saving_hooks import CheckpointSaverHook as CheckpointSaverHook
from .saving_hooks import CheckpointSaverListener as CheckpointSaverListener
from .serving import Serving as Serving
from .session import MonitoredTrainingSession as MonitoredTrainingSession
from .session import Trainable as Trainable
from .session_run_hook import SecondOrStepTimer as SecondOrStepTimer
from .session_run_hook import SessionRunArgs as SessionRunArgs
from .session_run_hook import SessionRunHook as SessionRunHook
from .specs import EvalSpec as EvalSpec
from .specs import RunConfig as RunConfig
from .specs import TrainSpec as TrainSpec
from .statistics import FeatureStatistics as FeatureStatistics
from .statistics import compute_once as compute_once
from .summary_hooks import ProfilerHook as ProfilerHook
from .summary_hooks import StalenessHook as StalenessHook
from .summary_hooks import StepCounterHook as StepCounterHook
from .summary_hooks import SummarySaverHook as SummarySaverHook
from .tfds_inputs import read_array_records as read_array_records
from .tfds_inputs import read_tfds as read_tfds
from .training import train_and_evaluate as train_and_evaluate
from .warm_start import WarmStartSettings as WarmStartSettings
from .workload import Workload as Workload
