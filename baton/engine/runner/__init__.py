"""Runs forwards: the model, its cache, CUDA graphs, and the memory that all of it takes."""
