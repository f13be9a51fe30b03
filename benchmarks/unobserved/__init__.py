"""A folder for ``PYTHONPATH``; see :mod:`sitecustomize` in it."""
