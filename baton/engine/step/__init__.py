"""Parts of the engine's step: the step itself, overlap with the step before it, and what steps cost."""
