"""The comparisons of `python -m benchmarks.run`, one per file."""
