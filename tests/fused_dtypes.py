"""The types that the fused decoder is compiled for, as cases of a test."""

FUSED_DTYPES = ("float32", "bfloat16")
