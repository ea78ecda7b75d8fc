"""Programs that are measured: one task of a cluster, or one process."""
