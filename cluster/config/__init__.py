"""The configuration of a cluster."""
