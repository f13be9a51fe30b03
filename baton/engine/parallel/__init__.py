"""Tensor parallelism: one model over several processes, its ranks, each of which holds a part of every layer."""
