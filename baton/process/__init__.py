"""What a process needs besides its work: signals, cores, garbage collection, environment, background tasks."""
