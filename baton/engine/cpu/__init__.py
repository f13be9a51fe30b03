"""A compiled CPU decoder for models of the Llama family: one Numba program computes a whole step."""
