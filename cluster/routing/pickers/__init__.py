"""Pickers: who of the scored workers it is."""
