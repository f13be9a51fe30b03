"""Explains where a request's time went, and why. No torch."""
