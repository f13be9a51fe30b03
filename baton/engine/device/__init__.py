"""Asynchronous transfers between host and device, and device errors."""
