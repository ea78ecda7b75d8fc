from .dynamic import DynamicEmbedding as DynamicEmbedding
from .layer import PartitionedEmbedding as PartitionedEmbedding
