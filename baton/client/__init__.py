"""The HTTP client of a router, and the record of the cluster on this machine."""
