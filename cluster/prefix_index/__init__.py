"""Which worker holds how much of a prompt."""
