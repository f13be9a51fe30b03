"""Routing: filters, weighted scorers and a picker choose the workers of a request. No torch, no gRPC."""
