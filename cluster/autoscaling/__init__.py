"""Capacity of the pools, and when to change it. Pure arithmetic, so that simulations use it too."""
