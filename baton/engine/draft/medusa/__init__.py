"""Medusa heads: network, checkpoint format, and the state of each request."""
