"""Trains drafts on the target's own answers. Knows the engine, and nothing of clusters."""
