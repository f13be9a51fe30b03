"""EAGLE heads: network, checkpoint formats, and the state of each request."""
