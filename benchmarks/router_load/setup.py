"""The configuration that router and workers share, and the profile of workers that cost almost nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.engine.models.model_source import resolve_model
from cluster.config.config import BatonConfig

BLOCK_SIZE = 16
"""Tokens per block."""
_LENIENT = "1h"
"""A target that every request meets, since targets do not matter here."""
_SEATS = 4096


@dataclass(frozen=True, slots=True)
class Workers:
    """Simulated workers.

    Attributes:
        step_ms: duration of every step.
        decode_step_ms: duration of every step of decode workers; ``None`` means ``step_ms``.
        tokens_per_message: maximum number of tokens per message of a stream.
        kv_blocks: size of each worker's cache in blocks.
    """

    prefill: int = 1
    decode: int = 1
    step_ms: float = 0.1
    decode_step_ms: float | None = None
    tokens_per_message: int = 1
    kv_blocks: int = 2048


def write_setup(folder: Path, workers: Workers, overrides: dict[str, Any]) -> Path:
    """Writes profile and configuration into a folder; returns the file with the configuration.

    Args:
        overrides: sections of the configuration, which override the benchmark's own.

    Raises:
        BatonError: the configuration is wrong, or the model, of which only the tokenizer is used, is missing.
    """
    profile = folder / "profile.yaml"
    profile.write_text(json.dumps(_profile(workers)), encoding="utf-8")  # JSON is YAML too
    lenient = {"ttft": _LENIENT, "tpot": _LENIENT}
    pool = {"chunk_tokens": _SEATS, "max_num_seqs": _SEATS, "kv_blocks": workers.kv_blocks}
    values: dict[str, Any] = {
        "router": {"max_inflight": 2 * _SEATS},
        "prefill": {"workers": workers.prefill, **pool},
        "decode": {"workers": workers.decode, **pool},
        "engine": {"block_size": BLOCK_SIZE},
        "slo": {"classes": {"standard": lenient}},
        "simulation": {"profile": str(profile), "tokens_per_message": workers.tokens_per_message},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(_merged(values, overrides)), encoding="utf-8")
    return file


def _merged(values: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    config = dict(values)
    for section, value in overrides.items():
        config[section] = {**config.get(section, {}), **value} if isinstance(value, dict) else value
    source = resolve_model(BatonConfig.from_dict(config).model)  # the processes have another cache
    return {**config, "model": source.path, "served_model_name": config.get("served_model_name", source.name)}


def _profile(workers: Workers) -> dict[str, Any]:
    decode_step_ms = workers.step_ms if workers.decode_step_ms is None else workers.decode_step_ms
    return {
        "gpu": "none",
        "model": "none",
        "step": _step(workers.step_ms),
        "decode_step": _step(decode_step_ms),
        "transfer": {"fixed_ms": 0.0, "bytes_per_second": 1e12},
        "kv_tokens": 4_000_000,
        "kv_bytes_per_token": 1024,
        "max_model_len": 8192,
        "noise": 0.0,
    }


def _step(fixed_ms: float) -> dict[str, float]:
    nothing = ("per_prompt_token", "per_attention_pair", "per_sequence", "per_context_token")
    return {"fixed": fixed_ms, **dict.fromkeys(nothing, 0.0)}
