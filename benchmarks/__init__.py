"""What produces every performance figure of tfdist."""
