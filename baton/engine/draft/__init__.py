"""Networks that guess what the target says next, and loaders of their checkpoints. The methods that use them are
proposers of the decode role."""
