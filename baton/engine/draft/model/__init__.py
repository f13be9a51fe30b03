"""Smaller language models as drafts, and the state of each request."""
