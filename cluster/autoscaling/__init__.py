"""Capacity of the pools, and rules for changing it. Pure arithmetic, shared with simulations."""
