"""The benchmarks behind tfdist's performance figures, most of them in `run`."""
