"""Checks and measures baton on a GPU machine. The report survives every failure."""
