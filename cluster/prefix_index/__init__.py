"""The router's index of the workers' prefix caches."""
