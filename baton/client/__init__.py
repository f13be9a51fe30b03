"""The HTTP client of a router, and how commands find the cluster of this machine."""
