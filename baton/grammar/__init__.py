"""Grammars that restrict a request's tokens: built from schemas and expressions, compiled for a vocabulary, and kept
in step with the tokens. The only place that knows llguidance.
"""
