"""``baton bench serve``, ``sweep`` and ``compare``: load tests of any OpenAI-compatible endpoint."""
