"""The numbers that rows of fp8 are scaled to. Without Triton, which only the ``gpu`` extra installs."""

from __future__ import annotations

LARGEST = 448.0
"""Largest number of e4m3."""
LEAST = 1e-12
"""Lower bound of a row's largest number when its scale is computed."""
