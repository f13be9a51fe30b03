"""Attention over the paged KV cache, plugged into transformers' models. One file per backend."""
