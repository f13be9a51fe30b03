"""Drafts of every kind for the tiny target, loaded as a decode worker loads them, and settings of speculation."""

from __future__ import annotations

from pathlib import Path

import torch

from baton.engine.draft.eagle.eagle_checkpoint import load_eagle
from baton.engine.draft.loading import LoadedDraft
from baton.engine.draft.medusa.heads import load_medusa
from baton.engine.draft.model.draft_model import DraftModel
from baton.engine.models.model_loader import LoadedModel, prepare_model
from cluster.config.worker_config import SpeculationConfig
from tests.tiny_drafts import VOCAB, tiny_draft_lm, tiny_eagle, tiny_eagle3, tiny_medusa_v1

CHAINS = SpeculationConfig(max_draft_tokens=4, tree_max_batch=0)
TREES = SpeculationConfig(max_draft_tokens=4, max_tree_tokens=8, tree_max_batch=8)
DRAWN = SpeculationConfig(max_draft_tokens=4, tree_max_batch=0, acceptance="residual")


def draft_for(method: str, target: LoadedModel, folder: Path) -> LoadedDraft | None:
    """The draft that a method needs, written into ``folder`` first; ``None`` for methods without one."""
    where = torch.float32, torch.device("cpu")
    if method in ("eagle", "eagle3"):
        make = tiny_eagle if method == "eagle" else tiny_eagle3
        return LoadedDraft(method, "head", load_eagle(make().write(folder), target.model, *where))
    if method == "medusa":
        written = tiny_medusa_v1().write(folder, "medusa_lm_head.pt")
        return LoadedDraft(method, "heads", load_medusa(written, target.model, *where))
    if method == "draft_model":
        return LoadedDraft(method, "model", DraftModel(prepare_model(tiny_draft_lm(), "float32"), VOCAB))
    return None
