"""Loads a draft checkpoint of any kind for one target, and creates the state of its network on a worker."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import torch

from baton.core.errors import ConfigError
from baton.engine.contracts import DraftNetwork
from baton.engine.device.uploads import TORCH_DTYPES
from baton.engine.draft.eagle.eagle_checkpoint import load_eagle, settle_feature_layers
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.eagle.head import EagleHead
from baton.engine.draft.medusa.heads import MedusaHeads, load_medusa
from baton.engine.draft.medusa.medusa_state import MedusaState
from baton.engine.draft.model.draft_model import DraftModel, load_draft_model
from baton.engine.draft.model.token_state import TokenState
from baton.engine.draft.network import DraftState
from baton.engine.draft.references import kind_of, resolve_draft
from baton.engine.models.float32_products import speed_up_products
from baton.engine.models.model_loader import LoadedModel
from baton.engine.models.tokenizer import Tokenizer
from baton.engine.runner.model_runner import ModelRunner

logger = logging.getLogger(__name__)

# Any text works: only the agreement of head and target on it counts.
_PROBE_TEXT = """
A library lends books, and a reader brings them back. In the morning the doors open, people come in from the rain, and
someone asks for a map of the old town. The librarian walks to the third shelf, takes a thin green volume and says that
it must stay in the reading room. So the visitor sits down at the window, turns the pages and copies the names of the
streets by hand. Later, when the sun is out again, the map goes back to its place between the others, and the visitor
finds the way to the river without asking anyone. That is what maps are for.
"""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft network with its method.

    Attributes:
        method: name of the speculation method that uses it.
        name: the reference from which it was loaded.
    """

    method: str
    name: str
    network: DraftNetwork


def load_draft(
    reference: str, model: str, model_path: str, target: LoadedModel, method: str | None = None
) -> LoadedDraft | None:
    """Loads the draft of ``speculation.draft`` in the target's dtype and on its device.

    Args:
        reference: as for :func:`baton.engine.draft.references.resolve_draft`.
        model: the target, as the configuration names it.
        model_path: location of the target's tokenizer.
        method: the method that ``auto`` chooses a draft for.

    Returns:
        ``None`` when there is nothing to load.

    Raises:
        ConfigError: the checkpoint is missing or broken.
        UnsupportedModelError: it belongs to another target or cannot be used; the message says what differs.
    """
    found = resolve_draft(reference, model, method)
    if found is None:
        return None
    dtype, device = TORCH_DTYPES[target.dtype_name], target.model.device
    kind = kind_of(found)
    if kind == "medusa":
        heads = load_medusa(found, target.model, dtype, device)
        speed_up_products(heads, device)
        return LoadedDraft("medusa", str(found), heads)
    tokenizer = Tokenizer.load(model_path)
    if kind == "draft_model":
        draft = load_draft_model(str(found), target, tokenizer, device, target.dtype_name)
        return LoadedDraft("draft_model", str(found), draft)
    head = load_eagle(found, target.model, dtype, device)
    speed_up_products(head, device)
    if len(head.feature_layer_choices) > 1:
        _settle(head, target, tokenizer, str(found))
    return LoadedDraft("eagle" if head.settings.version == 1 else "eagle3", str(found), head)


def create_draft_state(network: DraftNetwork, runner: ModelRunner, *, ships_prompts: bool = False) -> DraftState:
    """Creates the state of a network on one worker.

    Args:
        runner: runner of the target, built with ``network`` as its draft.
        ships_prompts: True on a worker that sends the KV of prompts as soon as it is computed.

    Raises:
        TypeError: the network is of an unknown kind.
    """
    if isinstance(network, EagleHead):
        return FeatureState(network, runner)
    if isinstance(network, MedusaHeads):
        return MedusaState(network, runner)
    if isinstance(network, DraftModel):
        return TokenState(network, runner, ships_prompts=ships_prompts)
    raise TypeError(f"there is no draft state for {type(network).__name__}")


def relative_size(draft: LoadedDraft, target: LoadedModel) -> float:
    """The number of the draft's own parameters relative to the target's; 0 if it is not known."""
    network = draft.network
    whole = _num_parameters(target)
    if isinstance(network, DraftModel):
        return _num_parameters(network.loaded) / whole if whole else 0.0
    if isinstance(network, torch.nn.Module):
        return sum(weight.numel() for weight in network.parameters()) / whole if whole else 0.0
    return 0.0


def _num_parameters(loaded: LoadedModel) -> int:
    """Parameters of a model, of all ranks that divide it."""
    num_ranks = 1 if loaded.group is None else loaded.group.size
    return num_ranks * sum(weight.numel() for weight in loaded.model.parameters())


@torch.inference_mode()
def _settle(head: EagleHead, target: LoadedModel, tokenizer: Tokenizer, name: str) -> None:
    """Determines the meaning of the checkpoint's layer ids. No runner may have the target yet."""
    known = [token for token in tokenizer.encode(_PROBE_TEXT.strip().replace("\n", " ")) if token < target.vocab_size]
    token_ids = torch.tensor(known, device=target.model.device)
    if len(token_ids) < 2:
        raise ConfigError(f"draft checkpoint {name}: the target's tokenizer finds no tokens in an English text.")
    target.model.set_attn_implementation("eager")  # need not be restored, since a runner sets its own
    output: Any = target.model(input_ids=token_ids[None], output_hidden_states=True, use_cache=False)
    states = {layer: state[0] for layer, state in enumerate(output.hidden_states)}
    agreement = settle_feature_layers(head, states, token_ids, output.logits[0].argmax(dim=-1))
    logger.info(
        "draft %s reads the target layers %s (agreement of each choice: %s)", name, head.feature_layers, agreement
    )
