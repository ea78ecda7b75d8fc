"""The measured programs: each runs one task of a cluster, or alone."""
