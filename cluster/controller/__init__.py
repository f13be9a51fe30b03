"""Starts the cluster, owns its pools, and replaces workers that are lost."""
