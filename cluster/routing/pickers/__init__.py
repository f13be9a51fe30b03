"""Pickers: which of the scored routes it is."""
