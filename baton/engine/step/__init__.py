"""Parts of the engine's step: the step itself, its overlap with the step before, and its cost."""
