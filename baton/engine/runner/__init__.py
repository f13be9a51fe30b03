"""Runs forwards: the model, its cache, CUDA graphs, and their memory."""
