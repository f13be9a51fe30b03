"""The dtypes of the fused decoder, as cases of tests."""

FUSED_DTYPES = ("float32", "bfloat16")
