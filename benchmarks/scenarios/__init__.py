"""The comparisons that `python -m benchmarks.run` makes, one per file."""
