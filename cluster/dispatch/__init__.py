"""Runs each request on its workers, and retries when workers fail."""
