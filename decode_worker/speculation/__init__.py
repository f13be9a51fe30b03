"""Speculative decoding. ``verification.py`` accepts or rejects drafts; each method has its own file."""
