"""The ``baton`` command."""
