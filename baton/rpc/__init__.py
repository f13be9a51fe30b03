"""gRPC between the router and workers: channels, and conversions between objects and messages."""
