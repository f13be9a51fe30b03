"""Traces of speculation with the texts of their tokens."""

from __future__ import annotations

from typing import Any

from baton.core.rounds import RoundLog
from baton.engine.models.tokenizer import Tokenizer
from cluster.gateway.openai.prompt_encoder import PromptEncoder

Json = dict[str, Any]
_NUMBERS_PER_ROUND = 32


def describe_rounds(rounds: RoundLog, tokenizer: Tokenizer) -> Json:
    """The trace of one choice, as answers have it. Takes about a microsecond per token."""
    return add_texts(rounds.to_dict(), tokenizer)


async def add_texts_to_timeline(timeline: Json, encoder: PromptEncoder) -> None:
    """Adds the texts to the traces in an answer of ``GET /v1/requests/{id}/timeline``."""
    for entry in (timeline, *timeline.get("sequences", ())):
        if (speculation := entry.get("speculation")) is not None:
            size = len(speculation["rounds"]) * _NUMBERS_PER_ROUND
            await encoder.off_loop(size, add_texts, speculation, encoder.tokenizer)


def add_texts(speculation: Json, tokenizer: Tokenizer) -> Json:
    """Adds the texts to a trace of token ids, as timelines have it, and returns it."""
    for one in speculation["rounds"]:
        for part in (one["draft"], one["output"]):
            part["texts"] = list(map(tokenizer.token_text, part["token_ids"]))
    return speculation
