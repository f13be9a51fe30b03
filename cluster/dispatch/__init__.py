"""Takes each request through its workers, and tries again when workers fail."""
