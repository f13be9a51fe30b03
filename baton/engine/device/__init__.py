"""Transfers between the host and the device without waiting, and errors of the device."""
