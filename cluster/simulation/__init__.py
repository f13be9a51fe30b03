"""Simulated workers: step times come from a profile, KV blocks and prefix caches are real. No torch."""
