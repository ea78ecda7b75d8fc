"""The measured programs: each is one task of a cluster, or one process."""
