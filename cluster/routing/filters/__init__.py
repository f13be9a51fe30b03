"""Filters: who may serve the request at all."""
