"""Quantized checkpoints, read as if they were plain ones."""
