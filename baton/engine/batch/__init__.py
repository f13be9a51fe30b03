"""Builds the tensors of one forward from the scheduler's plan."""
