"""What a device run takes from the tests: tiny models and drafts with random weights, and how requests are run.

The only module of ``benchmarks`` that imports ``tests``, which are not installed: a device run needs the working tree.
"""

from __future__ import annotations

from tests.drafting import MAX_DRAFT_TOKENS, Recording, Unweighed, engine_over, prompts, requests_for
from tests.drafting import run as run_requests
from tests.engine_runs import Outcome, build_engine, greedy, run, run_tokens
from tests.late_copies import LateCopies
from tests.tiny_drafts import (
    TinyDraft,
    tiny_draft_lm,
    tiny_eagle,
    tiny_eagle3,
    tiny_medusa_v1,
    tiny_target,
)
from tests.tiny_models import CONFIGS, model_with_reference, random_prompts, tiny_model
from tests.toy_proposers import Oracle

__all__ = [
    "CONFIGS",
    "MAX_DRAFT_TOKENS",
    "LateCopies",
    "Oracle",
    "Outcome",
    "Recording",
    "TinyDraft",
    "Unweighed",
    "build_engine",
    "engine_over",
    "greedy",
    "model_with_reference",
    "prompts",
    "random_prompts",
    "requests_for",
    "run",
    "run_requests",
    "run_tokens",
    "tiny_draft_lm",
    "tiny_eagle",
    "tiny_eagle3",
    "tiny_medusa_v1",
    "tiny_model",
    "tiny_target",
]
