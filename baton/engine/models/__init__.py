"""Locating, loading and converting models and their tokenizers."""
