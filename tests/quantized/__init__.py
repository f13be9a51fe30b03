"""Tiny quantized checkpoints, each written by the library of its scheme."""
