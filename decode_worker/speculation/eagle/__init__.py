"""EAGLE as a speculation method: chains, and EAGLE-2's trees for small batches."""
