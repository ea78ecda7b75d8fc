"""A file for each comparison that `python -m benchmarks.run` makes."""
