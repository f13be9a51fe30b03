"""Workers without weights: their time comes from a profile, their blocks and prefix caches are real ones. No torch."""
