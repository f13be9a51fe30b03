"""The types that the fused decoder is compiled for, as cases of a test."""

from __future__ import annotations

import pytest
import torch

from engine.model_loader import has_bfloat16

IN_BFLOAT16 = () if has_bfloat16(torch.device("cpu")) else (pytest.mark.thorough,)
"""Marks for tests of the decoder in bfloat16. Where a CPU has no instructions for it, ``dtype: auto`` is float32, and
compiling and running what replaces them takes minutes."""

FUSED_DTYPES = ("float32", pytest.param("bfloat16", marks=IN_BFLOAT16))
