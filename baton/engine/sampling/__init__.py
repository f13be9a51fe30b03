"""Sampling and verification of tokens from logits."""
