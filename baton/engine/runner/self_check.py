"""Compares a runner's logits with those of the model's own attention, before the runner serves."""

from __future__ import annotations

import torch

from baton.core.drafts import Draft, ScheduledSequence
from baton.core.errors import UnsupportedModelError
from baton.core.kv_spec import KVEncoding
from baton.core.request import Request, SamplingParams
from baton.engine.models.model_loader import check_tokens, own_logits, relative_distance
from baton.engine.runner.forward_choice import CHECK_FAILURES, CHECK_TOLERANCE, relative_error, small_cache
from baton.engine.runner.forward_pass import TransformersForward
from baton.engine.runner.model_runner import ModelRunner

_QUANTIZED_TOLERANCE = 0.25
"""Tolerance for quantized weights, in any dtype; trained models stay far below."""
_ENCODED_TOLERANCE = 0.1
"""Tolerance for KV that was stored or sent in a lossy encoding, in any dtype."""
_NUM_ENCODED, _NUM_BEHIND = 56, 8


def check_model(runner: ModelRunner) -> None:
    """Compares chunked, paged logits with those of the model's own attention over a short input.

    Detects state that a layer keeps between steps besides KV, and KV that the cache loses. Takes a few short forwards
    and overwrites the cache's first blocks.

    Raises:
        UnsupportedModelError: they differ by more than rounding, of quantized weights and KV too, explains.
    """
    loaded, spec = runner.loaded, runner.spec
    weights, encoding, name = spec.weights, spec.encoding, type(loaded.model).__name__
    tolerance = CHECK_TOLERANCE[loaded.dtype_name]
    is_lossless = weights == "native" and encoding is KVEncoding.NATIVE
    try:
        errors = [relative_error(loaded, runner.cache, runner.forward_pass), loaded.weights_error]
        if encoding is not KVEncoding.NATIVE:
            errors.append(_kept_error(runner))
        # The fused decoder was compared with native weights and KV before it was chosen.
        native_error = errors[0] if is_lossless else 0.0 if runner.is_fused else _native_error(runner)
    except CHECK_FAILURES as failure:
        raise UnsupportedModelError(
            f"{name} fails with the paged cache: {type(failure).__name__}: {failure}"
        ) from failure
    if not native_error <= tolerance:
        raise UnsupportedModelError(
            f"{name} gives different logits with the paged cache than without it (relative error {native_error:.2g}). "
            "Some of its layers keep state besides keys and values, or attend in an unsupported way. "
            "Set engine.self_check: false to serve it anyway."
        )
    allowed = tolerance if weights == "native" else _QUANTIZED_TOLERANCE
    causes: dict[str, str] = {}
    if weights != "native":
        causes["engine.weights"] = f"{weights} weights"
    if encoding is not KVEncoding.NATIVE:
        allowed += _ENCODED_TOLERANCE
        causes["engine.kv_cache"] = f"an {encoding} KV cache"
    if all(error <= allowed for error in errors):
        return
    error = max(errors, key=lambda each: (each != each, each))  # NaN counts as the largest error
    raise UnsupportedModelError(
        f"{name} gives different logits with {' and '.join(causes.values())} (relative error {error:.2g}, at most "
        f"{allowed:.2g} is allowed). Set {' or '.join(causes)} to native, or engine.self_check to false to serve "
        "it anyway."
    )


def check_encoding(runner: ModelRunner, encoding: KVEncoding) -> None:
    """Compares logits over KV that was encoded and decoded with logits over the same KV unchanged.

    Takes three short forwards and overwrites the cache's first blocks.

    Raises:
        UnsupportedModelError: they differ too much, for example because a few numbers of a vector dwarf the others.
    """
    error = encoding_error(runner, encoding)
    if not error <= _ENCODED_TOLERANCE:
        raise UnsupportedModelError(
            f"{type(runner.loaded.model).__name__} gives different logits when its KV is sent as {encoding} (relative "
            f"error {error:.2g}, at most {_ENCODED_TOLERANCE:g} is allowed). Set kv_transfer.encoding: native, or "
            "engine.self_check: false to serve it anyway."
        )


@torch.inference_mode()
def encoding_error(runner: ModelRunner, encoding: KVEncoding) -> float:
    """Relative error of the logits of some tokens when only the KV of the tokens before them was encoded."""
    token_ids = _tokens_for_encoding(runner)
    if token_ids is None:
        return 0.0
    behind = _computed_but_for_the_last(runner, token_ids)
    expected = runner.forward(runner.build_batch([behind])).clone()
    request = behind.request
    runner.cache.pass_through(request.block_ids, request.num_computed_tokens, encoding)
    return relative_distance(runner.forward(runner.build_batch([behind])), expected)


def _native_error(runner: ModelRunner) -> float:
    """Relative error of the model's modules over a small cache with native KV."""
    cache = small_cache(runner.loaded, runner.spec.block_size)
    modules = TransformersForward(runner.loaded, runner.create_backend(cache))
    try:
        return relative_error(runner.loaded, cache, modules)
    finally:
        modules.close()


@torch.inference_mode()
def _kept_error(runner: ModelRunner) -> float:
    """Relative error of an encoded cache, against the model's own attention."""
    token_ids = _tokens_for_encoding(runner)
    if token_ids is None:
        return 0.0
    found = runner.forward(runner.build_batch([_computed_but_for_the_last(runner, token_ids)]))
    return relative_distance(found, own_logits(runner.loaded.model, token_ids)[-_NUM_BEHIND:])


def _tokens_for_encoding(runner: ModelRunner) -> list[int] | None:
    """As many tokens as the cache and the model have room for; ``None`` when there are too few."""
    room = min(runner.loaded.max_model_len, runner.cache.num_blocks * runner.spec.block_size)
    count = min(_NUM_ENCODED, room - _NUM_BEHIND)
    return check_tokens(count + _NUM_BEHIND, runner.loaded.vocab_size) if count > 0 else None


def _computed_but_for_the_last(runner: ModelRunner, token_ids: list[int]) -> ScheduledSequence:
    """Computes the first tokens; returns the others as a draft, since a step gives logits for all tokens of a draft."""
    count = len(token_ids) - _NUM_BEHIND
    request = Request("encoding-check", token_ids[: count + 1], SamplingParams())
    request.block_ids = list(range(-(-len(token_ids) // runner.spec.block_size)))
    runner.forward(runner.build_batch([ScheduledSequence(request, count)]))
    request.num_computed_tokens = count
    return ScheduledSequence(request, 1, Draft(tuple(token_ids[count + 1 :])))
