"""Decoders of the Llama family on the CPU, as one compiled program over a step. Numba compiles it."""
