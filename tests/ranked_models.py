"""Tiny models over several ranks, for tests. Rank 0 is the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from baton.core.kv_spec import KVCacheSpec
from baton.core.request import SamplingParams
from baton.engine.draft.loading import LoadedDraft, load_draft
from baton.engine.kv_cache.paged_cache import Allocator
from baton.engine.models.model_loader import LoadedModel, load_model, own_logits
from baton.engine.models.model_source import ModelSource
from baton.engine.parallel.followers import LOADING_SILENCE_S, SILENCE_S, Followers
from baton.engine.parallel.group import RankGroup
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.runner.self_check import check_model
from tests.engine_runs import BLOCK_SIZE, build_engine, greedy, run, tokens_of
from tests.tiny_models import CONFIGS, build_model, random_prompts
from tests.tiny_tokenizers import byte_level_tokenizer

CPU = torch.device("cpu")
NUM_BLOCKS = 512
NUM_TOKENS = 14
PROMPTS = random_prompts((1, 2, 3, 5, 8, 9, 16, 17, 23, 31, 32, 33, 40, 47, 55, 60))
_FEW_TOKENS = 6
"""Per request of :func:`many_ways`: a step of four ranks on two cores takes 0.1 s, and there are many architectures."""
_EXPERT_SIZE = 32
"""Rows of an expert, which four ranks can divide as torch's grouped products require."""


@dataclass(frozen=True, slots=True)
class Build:
    """What every rank builds.

    Attributes:
        model: folder of the model.
        draft: folder of its draft; empty without one.
    """

    model: str
    draft: str = ""
    kv_cache: str = "native"
    num_blocks: int = NUM_BLOCKS


def divisible_model(name: str) -> PreTrainedModel:
    """A tiny model of an architecture, which two and four ranks can divide."""
    config = CONFIGS[name]()
    if hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size = _EXPERT_SIZE
    return build_model(config)


def save(model: PreTrainedModel, folder: Path) -> str:
    model.save_pretrained(folder)
    return str(folder)


def save_servable(folder: Path) -> Path:
    """Saves a tiny model that ranks can divide, with a tokenizer, for a cluster."""
    save(divisible_model("llama"), folder)
    byte_level_tokenizer().save(folder)
    return folder


def load(folder: str, group: RankGroup | None) -> LoadedModel:
    return load_model(ModelSource(folder, "tiny"), "float32", CPU, group=group)


def build_with_draft(
    build: Build, group: RankGroup | None, allocate: Allocator | None = None
) -> tuple[ModelRunner, LoadedDraft | None]:
    """A rank's runner, after its self-check, and the draft on rank 0."""
    torch.set_num_threads(1)
    loaded = load(build.model, group)
    draft = load_draft(build.draft, "tiny", build.model, loaded) if build.draft else None
    if group is not None and group.rank:
        draft = None
    options = RunnerOptions(decoder="transformers", kv_cache=build.kv_cache)
    network = None if draft is None else draft.network
    runner = ModelRunner(loaded, build.num_blocks, BLOCK_SIZE, options, draft=network, allocate=allocate)
    check_model(runner)
    return runner, draft


def build_follower(build: Build, group: RankGroup, device: torch.device, allocate: Allocator) -> ModelRunner:
    """What a follower of :func:`ranked` builds."""
    runner, _ = build_with_draft(build, group, allocate)
    return runner


@contextmanager
def joined(
    builder: Callable[..., ModelRunner],
    argument: object,
    size: int,
    silence_s: float = SILENCE_S,
    loading_silence_s: float = LOADING_SILENCE_S,
) -> Iterator[tuple[RankGroup, Followers]]:
    """This process as rank 0 of ``size``; the followers call ``builder``."""
    followers = Followers(size, silence_s, loading_silence_s)
    try:
        group = followers.start(f"{builder.__module__}:{builder.__name__}", argument, CPU)
        yield group, followers
    finally:
        followers.close()
        RankGroup(0, size).leave()


@contextmanager
def ranked(
    build: Build, size: int, silence_s: float = SILENCE_S, loading_silence_s: float = LOADING_SILENCE_S
) -> Iterator[tuple[ModelRunner, LoadedDraft | None, Followers]]:
    """A runner over ``size`` ranks, and the draft that it keeps."""
    with joined(build_follower, build, size, silence_s, loading_silence_s) as (group, followers):
        runner, draft = build_with_draft(build, group)
        runner.lead(followers)
        yield runner, draft, followers


def sampled(count: int, num_tokens: int = NUM_TOKENS) -> list[SamplingParams]:
    """Parameters, of which every other one draws tokens."""
    return [SamplingParams(max_tokens=num_tokens, temperature=0.8 * (index % 2), seed=index) for index in range(count)]


def many_ways(runner: ModelRunner) -> dict[str, list[list[int]]]:
    """Tokens of sixteen prompts: chunked, preempted, and from cached prefixes; every other request draws its tokens."""
    params = sampled(len(PROMPTS), _FEW_TOKENS)
    longest = max(map(len, PROMPTS)) + _FEW_TOKENS
    engine = build_engine(runner, chunk_tokens=24)
    few = build_engine(runner, chunk_tokens=32, num_blocks=longest // BLOCK_SIZE + 3)
    found = {
        "chunked": tokens_of(run(engine, PROMPTS, params)),
        "cached": tokens_of(run(engine, PROMPTS, params)),
        "preempted": tokens_of(run(few, PROMPTS, params)),
        "alone": tokens_of(run(build_engine(runner, chunk_tokens=2048), PROMPTS[-1:], greedy(_FEW_TOKENS))),
    }
    if not few.scheduler.num_preemptions:
        raise RuntimeError("nothing was preempted")
    return found


@dataclass(frozen=True, slots=True)
class Facts:
    """What one architecture computes."""

    logits: torch.Tensor
    tokens: Mapping[str, list[list[int]]]
    spec: KVCacheSpec


def facts_of(folder: str, group: RankGroup | None, *, with_tokens: bool) -> Facts:
    """All ranks compute the same here, without a leader."""
    loaded = load(folder, group)
    spec = loaded.whole_spec(loaded.kv_spec(BLOCK_SIZE))
    logits = own_logits(loaded.model, PROMPTS[-1])
    if not with_tokens:
        return Facts(logits, {}, spec)
    runner = ModelRunner(loaded, NUM_BLOCKS, BLOCK_SIZE, RunnerOptions(decoder="transformers"))
    check_model(runner)
    return Facts(logits, many_ways(runner), spec)


def facts_of_all(
    folders: Sequence[tuple[str, bool]], group: RankGroup, device: torch.device, allocate: Allocator
) -> ModelRunner:
    """What followers do beside a rank 0 that calls :func:`facts_of` for the same folders."""
    torch.set_num_threads(1)
    for folder, with_tokens in folders:
        facts_of(folder, group, with_tokens=with_tokens)
    return ModelRunner(load(folders[0][0], group), 1, BLOCK_SIZE, RunnerOptions(decoder="transformers"))


def fp8_logits(folder: str, group: RankGroup | None) -> tuple[ModelRunner, torch.Tensor]:
    """A rank's runner of a model with fp8 weights, after its self-check, and the model's logits."""
    torch.set_num_threads(1)
    loaded = load_model(ModelSource(folder, "tiny"), "bfloat16", CPU, "fp8", group)
    logits = own_logits(loaded.model, PROMPTS[-1])
    runner = ModelRunner(loaded, NUM_BLOCKS, BLOCK_SIZE, RunnerOptions(decoder="transformers", weights="fp8"))
    check_model(runner)
    return runner, logits


def build_fp8_follower(folder: str, group: RankGroup, device: torch.device, allocate: Allocator) -> ModelRunner:
    """What followers do beside a rank 0 that calls :func:`fp8_logits`."""
    return fp8_logits(folder, group)[0]
