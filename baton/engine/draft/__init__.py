"""Draft networks, and loaders of their checkpoints. The decode role's proposers use them."""
