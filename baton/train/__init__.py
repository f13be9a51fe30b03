"""Trains drafts on the target's own answers. Depends on the engine, not on clusters."""
