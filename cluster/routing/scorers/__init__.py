"""Scorers: how good a choice each worker is, in [0, 1]."""
