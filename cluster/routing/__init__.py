"""Which worker serves a request: filters, weighted scorers, a picker. One file each; no torch, no gRPC."""
