from .layer import PartitionedEmbedding as PartitionedEmbedding
