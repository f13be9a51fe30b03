"""Request parameters to the engine's sampling parameters."""

from __future__ import annotations

import hashlib
import re
import secrets

from baton.core.errors import ContextLengthError, InvalidRequestError
from baton.core.request import MAX_LOGPROBS, SEED_LIMIT, SamplingParams
from cluster.gateway.openai.json_body import shown
from cluster.gateway.openai.schemas import BaseRequest
from cluster.requests.generation import ModelCard

_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,11}")


def build_sampling_params(
    request: BaseRequest, card: ModelCard, max_tokens: int, num_logprobs: int | None
) -> SamplingParams:
    """Sampling parameters of choice 0.

    Raises:
        InvalidRequestError: a value is out of its range, or a token id is not in the model's vocabulary.
    """
    if num_logprobs is not None and not 0 <= num_logprobs <= MAX_LOGPROBS:
        param = "top_logprobs" if "top_logprobs" in type(request).model_fields else "logprobs"
        raise InvalidRequestError(
            f"{param} must be between 0 and {MAX_LOGPROBS}, got {shown(num_logprobs)}.", param=param
        )
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=request.temperature,
        # A limit that no vocabulary reaches is none; it may also be too large for the wire.
        top_k=0 if request.top_k >= card.vocab_size else request.top_k,
        top_p=request.top_p,
        min_p=request.min_p,
        repetition_penalty=request.repetition_penalty,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=_parse_logit_bias(request.logit_bias),
        stop_token_ids=tuple(dict.fromkeys(request.stop_token_ids or ())),
        ignore_eos=request.ignore_eos,
        min_tokens=request.min_tokens,
        logprobs=num_logprobs,
        seed=resolve_seed(request.seed),
    )
    params.check_token_ids(card.vocab_size)
    return params


def resolve_max_tokens(
    num_prompt_tokens: int,
    requested: int | None,
    default: int | None,
    card: ModelCard,
    params: tuple[str, str],
) -> int:
    """How many tokens may be generated: as ``requested``, else ``default``, else whatever the context has room for.

    ``params`` are the request's names of the prompt and of the bound, for messages.

    Raises:
        InvalidRequestError: the bound is not positive, or the prompt has no tokens.
        ContextLengthError: prompt and output together do not fit into the model's context.
    """
    prompt_param, bound_param = params
    if num_prompt_tokens == 0:
        raise InvalidRequestError(f"{prompt_param} has no tokens; it must have at least one.", param=prompt_param)
    if requested is not None and requested < 1:
        raise InvalidRequestError(f"{bound_param} must be at least 1, got {shown(requested)}.", param=bound_param)
    room = card.max_model_len - num_prompt_tokens
    if room < 1:
        raise ContextLengthError(
            f"This model's context is {card.max_model_len} tokens, prompt and output together, but {prompt_param} "
            f"has {num_prompt_tokens} tokens. Shorten it.",
            param=prompt_param,
        )
    if requested is None:
        return room if default is None else min(default, room)
    if requested > room:
        raise ContextLengthError(
            f"This model's context is {card.max_model_len} tokens, prompt and output together, but {prompt_param} has "
            f"{num_prompt_tokens} tokens and {bound_param} asks for {shown(requested)} more. Shorten the prompt or "
            f"ask for at most {room}.",
            param=bound_param,
        )
    return requested


def resolve_seed(seed: int | None) -> int:
    """The engine's seed: random when none was given, else the given one modulo 2^63.

    Raises:
        InvalidRequestError: the seed does not fit into 64 bits with a sign.
    """
    if seed is None:
        return secrets.randbelow(SEED_LIMIT)
    if not -SEED_LIMIT <= seed < SEED_LIMIT:
        raise InvalidRequestError(f"seed must be between -2^63 and 2^63 - 1, got {shown(seed)}.", param="seed")
    return seed % SEED_LIMIT


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of ``n`` choices: choice 0 has the request's own, the others have one derived from it."""
    if choice == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{choice}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % SEED_LIMIT


def _parse_logit_bias(logit_bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    for key in logit_bias or ():
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequestError(
                f"logit_bias has the key {shown(key)}, but keys must be token ids in decimal.", param="logit_bias"
            )
    return tuple((int(key), float(bias)) for key, bias in (logit_bias or {}).items())
