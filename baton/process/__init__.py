"""Process utilities: signals, cores, garbage collection, environment and background tasks."""
