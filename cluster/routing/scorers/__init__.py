"""Scorers: how good a choice each route is, in [0, 1]."""
