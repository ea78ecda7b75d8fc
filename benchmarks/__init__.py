"""What produces every performance figure of tfdist; most by `run`."""
