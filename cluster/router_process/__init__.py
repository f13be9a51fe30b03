"""The router's process: its endpoint, what it tells operators, and the other routers."""
