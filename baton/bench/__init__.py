"""``baton bench serve``, ``sweep`` and ``compare``: load on any OpenAI-compatible endpoint, and what it answered."""
