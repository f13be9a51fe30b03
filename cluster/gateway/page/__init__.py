"""The page for people at ``/``: its files, and the live figures that it shows."""
