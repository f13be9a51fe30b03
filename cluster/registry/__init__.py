"""The router's table of workers, and its connections to them."""
