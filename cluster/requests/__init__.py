"""Requests as the router sees them."""
