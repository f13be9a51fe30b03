"""Names of the two pools and of the speculation methods."""

from __future__ import annotations

from typing import Literal

PREFILL = "prefill"


DECODE = "decode"


POOLS = (PREFILL, DECODE)


DRAFT_METHODS = ("draft_model", "eagle", "eagle3", "medusa")
"""Speculation methods that need a draft of their kind."""


BUNDLED_DRAFTS = ("eagle3", "medusa", "draft_model")
"""The drafts that come with the default model, by the methods that they are for."""


SpeculationMethod = Literal[
    "auto",
    "none",
    "draft_model",
    "eagle",
    "eagle3",
    "lookahead",
    "medusa",
    "ngram",
    "suffix",
]
