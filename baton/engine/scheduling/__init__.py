"""Scheduling of tokens into steps, and the cost model of steps."""
