"""A cache in which nothing is a number: whoever reads what nobody wrote finds out."""

from __future__ import annotations

from benchmarks.device_run.attention_world import poison as spoil

__all__ = ["spoil"]
