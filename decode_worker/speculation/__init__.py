"""Speculative decoding. ``verification.py`` decides; each method has a file of its own."""
