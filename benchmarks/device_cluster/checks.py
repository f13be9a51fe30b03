"""The work of the parts of :mod:`benchmarks.device_cluster.parts`: tokens with every KV path, and speed. Needs Ray."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from benchmarks.device_cluster.load import Load, send
from benchmarks.device_cluster.parts import KV_PATHS, ClusterPart
from benchmarks.device_cluster.requests import DECODER, PlannedRequest, answers_of_one_engine, make_requests
from benchmarks.device_run.part import SHAPES, Row, Setting
from benchmarks.device_run.random_model import DTYPES, make_model
from cluster.config.config import BatonConfig
from cluster.controller.launch import Cluster

_VOCAB_SIZE = 300


def write_model(folder: Path, shape: str, device: torch.device) -> Path:
    """Writes config, weights and a byte-level tokenizer, unless they exist. Equal calls give equal weights.

    The tokenizer has fewer tokens than the model, so most tokens have no text; requests and answers are compared by
    token ids.
    """
    if (folder / "tokenizer.json").exists():
        return folder
    make_model(shape, device).to("cpu").save_pretrained(folder)
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE,
        special_tokens=["<|eos|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(["the quick brown fox jumps over the lazy dog"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|eos|>").save_pretrained(folder)
    return folder


_READ_BY_RECEIVER = ("shared_memory", "nixl")
_CONCURRENCY = 8


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of models and loads.

    Attributes:
        exact_shape: shape of the model whose tokens are compared; it is float32, so that rounding does not matter.
        count, longest, max_tokens: number, longest prompt and output tokens of the compared requests.
        concurrencies: concurrent requests of each speed measurement.
    """

    exact_shape: str
    count: int
    longest: int
    max_tokens: int
    concurrencies: tuple[int, ...]

    def requests(self) -> list[PlannedRequest]:
        """The compared requests."""
        return make_requests(self.count, self.longest, self.max_tokens, SHAPES[self.exact_shape]["vocab_size"])


_FULL = Sizes("small", count=32, longest=1500, max_tokens=64, concurrencies=(1, 8, 32))
_TINY = Sizes("tiny", count=10, longest=96, max_tokens=8, concurrencies=(2,))


def sizes_for(setting: Setting) -> Sizes:
    """The sizes for a setting; small ones for a tiny model."""
    return _TINY if setting.is_tiny else _FULL


def answer_without_cluster(part: ClusterPart, setting: Setting) -> Iterator[Row]:
    """Writes the models, and the tokens of a single engine without a cluster."""
    sizes = sizes_for(setting)
    for shape in dict.fromkeys((sizes.exact_shape, setting.shape)):
        started_s = time.monotonic()
        write_model(part.folder / shape, shape, setting.device)
        yield {"name": f"{shape} of random weights, {DTYPES[shape]}", "write_s": time.monotonic() - started_s}
    asked = sizes.requests()
    tokens = asyncio.run(
        answers_of_one_engine(part.folder / sizes.exact_shape, DTYPES[sizes.exact_shape], setting.device, asked)
    )
    (part.folder / "answers.json").write_text(json.dumps(tokens), encoding="utf-8")
    yield {"name": "tokens of the engine alone", "tokens": sum(map(len, tokens))}


def compare_tokens(part: ClusterPart, setting: Setting) -> Iterator[Row]:
    """Compares a cluster's tokens with the engine's, with the KV path that the part is named after."""
    if part.name == "nixl" and importlib.util.find_spec("nixl") is None:
        yield {"name": part.name, "not_run": "nixl is not installed"}
        return
    sizes = sizes_for(setting)
    expected = json.loads((part.folder / "answers.json").read_text(encoding="utf-8"))
    with _cluster(setting, part.folder / sizes.exact_shape, part.name) as (cluster, startup_s):
        load = asyncio.run(send(cluster.endpoint, sizes.requests(), _CONCURRENCY))
        row = _compare(part.name, load, expected, _metrics(cluster.endpoint))
    yield row | {"startup_s": startup_s}


def measure_speed(part: ClusterPart, setting: Setting) -> Iterator[Row]:
    """Measures a cluster under several loads, with the default KV path."""
    sizes = sizes_for(setting)
    with _cluster(setting, part.folder / setting.shape, next(iter(KV_PATHS))) as (cluster, startup_s):
        yield {"name": "start of both workers", "startup_s": startup_s}

        def load(concurrency: int, seed: int) -> Load:
            vocab_size = SHAPES[setting.shape]["vocab_size"]
            asked = make_requests(4 * concurrency, sizes.longest, sizes.max_tokens, vocab_size, seed)
            return asyncio.run(send(cluster.endpoint, asked, concurrency))

        load(sizes.concurrencies[0], seed=0)  # warms up
        for concurrency in sizes.concurrencies:
            found = load(concurrency, seed=concurrency)
            yield {"name": f"{concurrency} at a time", **found.figures()}
            yield {
                "name": f"{concurrency} at a time, by stage",
                **{f"{stage}_ms": ms for stage, ms in found.stages_ms.items()},
            }


@contextmanager
def _cluster(setting: Setting, model: Path, path: str) -> Iterator[tuple[Cluster, float]]:
    """A running 1 + 1 cluster whose workers share the GPU, and the duration of its start in seconds."""
    resources = {"cpus": 1.0, "gpus": 0.5 if setting.device.type == "cuda" else 0.0}
    config = BatonConfig.from_dict(
        {
            "model": str(model),
            "router": {"port": 0},
            "routing": {"local_prefill": "never"},
            "prefill": {"resources": resources},
            "decode": {"resources": resources},
            "engine": {"device": setting.device.type, "decoder": DECODER},
            "kv_transfer": KV_PATHS[path],
        }
    )
    started_s = time.monotonic()
    cluster = Cluster.start(config, lambda line: None)
    try:
        yield cluster, time.monotonic() - started_s
    finally:
        cluster.stop()


def _metrics(endpoint: str) -> dict[str, float]:
    """The router's metrics, summed over label sets."""
    sums: dict[str, float] = {}
    for line in httpx.get(f"{endpoint}/metrics", timeout=30).text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            key = name.split("{")[0]
            sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def _compare(path: str, load: Load, expected: Sequence[Sequence[int]], metrics: Mapping[str, float]) -> dict[str, Any]:
    """A row that is right if all tokens equal those of the engine alone and all KV used the path."""
    num_equal = sum(answer.token_ids == tokens for answer, tokens in zip(load.answers, expected, strict=True))
    moved = metrics["baton_kv_transfer_bytes_total"]
    read = metrics["baton_kv_transfer_shared_bytes_total"]
    went_right = moved > 0 and read == (moved if path in _READ_BY_RECEIVER else 0)
    return {
        "name": path,
        "ok": num_equal == len(expected) and went_right,
        "equal": f"{num_equal}/{len(expected)}",
        "kv_mib": moved / 2**20,
        "read_mib": read / 2**20,
        **load.figures(),
    }
