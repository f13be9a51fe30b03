"""Takes a request through its workers, and through their failures."""
