"""Measures drafting with a head in the shape of EAGLE-3, rounds with it, and sampling from a vocabulary."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from baton.core.chunk_budget import SchedulerLimits
from baton.core.request import FinishReason, Request, SamplingParams
from baton.engine.batch.attention_groups import Span
from baton.engine.draft.eagle.feature_state import FeatureState
from baton.engine.draft.eagle.head import EagleHead, EagleSettings
from baton.engine.draft.eagle.head_pass import ModuleHeadPass
from baton.engine.draft.layers import LayerSettings
from baton.engine.draft.loaded_target import shape_of
from baton.engine.engine import Engine
from baton.engine.kv_cache.block_manager import BlockManager
from baton.engine.models.model_loader import prepare_model
from baton.engine.runner.model_runner import ModelRunner
from baton.engine.runner.options import RunnerOptions
from baton.engine.sampling.logits import SamplingRow
from baton.engine.sampling.sampler import QueuedSample, queue_sample
from baton.engine.scheduling.scheduler import Scheduler
from baton.engine.scheduling.step_cost_model import StepCostModel
from benchmarks.device_run.children import run_here
from benchmarks.device_run.part import Row, Setting
from benchmarks.device_run.random_model import DTYPES, make_model
from benchmarks.device_run.timing import device_ms, host_ms, median_ms, synchronize
from decode_worker.speculation.chains import likeliest
from decode_worker.speculation.draft_length import DraftPasses
from decode_worker.speculation.eagle.proposer import EagleProposer
from decode_worker.speculation.verification import SampleAndMatch
from tests.drafting import Unweighed

_BLOCK_SIZE = 16
_DRAFT_TOKENS = 5


def run(setting: Setting) -> Iterator[Row]:
    """Measures sampling first, since it needs no model, then drafting, even if sampling fails."""
    return run_here(__name__, tuple(_CHECKS), setting)


def check(name: str, setting: Setting) -> Iterator[Row]:
    """Yields the rows of ``sampling`` or ``drafting``."""
    yield from _CHECKS[name](setting)


def _drafting(setting: Setting) -> Iterator[Row]:
    """Measures passes of a head, then rounds with it and steps without."""
    model = make_model(setting.shape, setting.device)
    head = make_head(model, 64 if setting.is_tiny else 32_000)
    loaded = prepare_model(model, DTYPES[setting.shape])
    context, batches = (32, (1, 2)) if setting.is_tiny else (1024, (1, 8))
    max_model_len = context + (64 if setting.is_tiny else 256)
    num_blocks = 1 + max(batches) * (-(-(max_model_len + _DRAFT_TOKENS) // _BLOCK_SIZE) + 1)
    runner = ModelRunner(loaded, num_blocks, _BLOCK_SIZE, RunnerOptions(decoder="transformers"), draft=head)
    runner.capture_graphs(max(batches), _DRAFT_TOKENS, max_model_len)
    for batch in batches:
        yield _pass_row(head, runner, batch, context, setting)
    for batch in batches:
        yield _round_row(head, runner, batch, context, max_model_len, setting, speculate=False)
        yield _round_row(head, runner, batch, context, max_model_len, setting, speculate=True)


def make_head(target: Any, draft_vocab_size: int) -> EagleHead:
    """An EAGLE-3 head with random weights: one layer of the target's size, three hidden states, its own lm_head."""
    config = target.config
    layers = LayerSettings(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.hidden_size // config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        hidden_act=config.hidden_act,
        rope=config.rope_parameters,
        max_positions=config.max_position_embeddings,
        windows=(None,),
    )
    shape = shape_of(target)
    middle, last = shape.num_layers // 2, max(1, shape.num_layers - 3)
    settings = EagleSettings(3, layers, shape, (1, middle, last), draft_vocab_size, maps_vocabulary=True)
    parameter = next(target.parameters())
    with torch.device(parameter.device):
        head = EagleHead(settings, target)
    return head.to(parameter.device, parameter.dtype).eval().requires_grad_(False)


def _sampling(setting: Setting) -> Iterator[Row]:
    """Measures the sampling of a step's tokens from logits on the device."""
    batch, vocab_size = (4, 512) if setting.is_tiny else (64, 128_256)
    logits = torch.randn(batch, vocab_size, device=setting.device) * 4
    kinds = {
        "greedy": SamplingParams(temperature=0),
        "temperature": SamplingParams(temperature=0.8),
        "top-p": SamplingParams(temperature=0.8, top_p=0.9),
        "top-k": SamplingParams(temperature=0.8, top_k=50),
    }
    for name, params in kinds.items():
        rows = [SamplingRow(params, 100 + index, [1], [2], params.token_edits()) for index in range(batch)]
        work = _sampler(logits, rows)
        yield {
            "name": f"{name} sampling, {batch} x {vocab_size}",
            "device_ms": median_ms(partial(device_ms, work, setting.device), 0.2),
            "full_ms": median_ms(partial(_read_ms, work), 0.2),
        }
    for num_rows, columns in (
        ((2, 64), (4, 64), (4, 512)) if setting.is_tiny else ((1, 32_000), (64, 32_000), (64, 128_256))
    ):
        rows_of_logits = torch.randn(num_rows, columns, device=setting.device)
        yield {
            "name": f"likeliest, {num_rows} x {columns}",
            "device_ms": None,
            "full_ms": median_ms(partial(host_ms, partial(likeliest, rows_of_logits, _as_they_are)), 0.2),
        }


def _as_they_are(columns: torch.Tensor) -> torch.Tensor:
    return columns


def _sampler(logits: torch.Tensor, rows: list[SamplingRow]) -> Callable[[], QueuedSample]:
    @torch.inference_mode()
    def queue() -> QueuedSample:
        return queue_sample(logits, rows)

    return queue


def _read_ms(queue: Callable[[], QueuedSample]) -> float:
    """Milliseconds until the tokens are on the host."""
    return host_ms(lambda: queue().read())


def _pass_row(head: EagleHead, runner: ModelRunner, batch: int, context: int, setting: Setting) -> Row:
    """Measures one pass of the head for one token of each sequence."""
    modules = ModuleHeadPass(head, runner.cache, runner.backend, len(runner.spec.layers))
    per_sequence = -(-(context + 1) // _BLOCK_SIZE)
    spans = [Span(list(range(i * per_sequence, (i + 1) * per_sequence)), context, 1) for i in range(batch)]
    hidden = torch.randn(batch, head.hidden_size, device=setting.device, dtype=head.dtype)

    @torch.inference_mode()
    def work() -> torch.Tensor:
        return modules.run(spans, [3] * batch, hidden, only_last=True)[1]

    def full() -> None:
        likeliest(work(), _as_they_are)
        synchronize(setting.device)

    return {
        "name": f"a pass of the head, batch {batch}, context {context}",
        "device_ms": median_ms(lambda: device_ms(work, setting.device), 0.3),
        "full_ms": median_ms(lambda: host_ms(full), 0.3),
    }


def _round_row(
    head: EagleHead,
    runner: ModelRunner,
    batch: int,
    context: int,
    max_model_len: int,
    setting: Setting,
    *,
    speculate: bool,
) -> Row:
    """Measures engine steps of a decoding batch. With random weights nearly all drafts are rejected: the worst case."""
    rng = random.Random(setting.seed)
    proposer = Unweighed(EagleProposer(FeatureState(head, runner), DraftPasses(StepCostModel()))) if speculate else None
    blocks = BlockManager(runner.cache.num_blocks, _BLOCK_SIZE, prefix_caching=False)
    scheduler = Scheduler(SchedulerLimits(max(8192, batch * context), batch, max_model_len), blocks)
    engine = Engine(runner, scheduler, SampleAndMatch(), proposer, max_draft_tokens=_DRAFT_TOKENS)
    params = SamplingParams(max_tokens=max_model_len - context, temperature=0, ignore_eos=True)
    for index in range(batch):
        prompt = [rng.randrange(runner.loaded.vocab_size) for _ in range(context)]
        scheduler.add(Request(str(index), prompt, params))
    num_drafted = num_rounds = 0

    def step() -> float:
        nonlocal num_drafted, num_rounds
        drafted: list[int] = []
        ms = host_ms(lambda: drafted.extend(output.num_drafted for output in engine.step()))
        num_drafted, num_rounds = num_drafted + sum(drafted), num_rounds + len(drafted)
        return ms

    for _ in range(3):
        step()
    num_drafted = num_rounds = 0
    ms = median_ms(step, 0.5, max_runs=20)
    for request in list(scheduler.requests):
        engine.finish(request.request_id, FinishReason.ABORT)
    what = "a round of drafting and verifying" if speculate else "a step without drafts"
    return {
        "name": f"{what}, batch {batch}, context {context}",
        "device_ms": None,
        "full_ms": ms,
        "drafted": num_drafted / max(1, num_rounds),
    }


_CHECKS: Mapping[str, Callable[[Setting], Iterator[Row]]] = {"sampling": _sampling, "drafting": _drafting}
