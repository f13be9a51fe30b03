"""Discovers the target's model, supported parameters and token counting before the measurement."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import orjson

from baton.bench.client import LoadClient
from baton.bench.endpoint import CHAT, COMPLETIONS, Endpoint, RequestSpec
from baton.bench.sample import Sample
from baton.bench.settings import TargetSettings
from baton.client.local_cluster import find_endpoint, read_state
from baton.client.router_client import API_KEY_VARIABLE
from baton.client.trust import tls_context
from baton.core.errors import BatonError, ConfigError
from baton.core.option_text import known_name
from baton.engine.models.model_source import resolve_model
from baton.engine.models.tokenizer import Tokenizer

_LIST_TIMEOUT_S = 30.0
_REFUSED = ("http_400", "http_422")


class TargetError(BatonError):
    """The endpoint does not answer like an OpenAI-compatible server."""

    code = "bench_target"
    http_status = 502


def describe_endpoint(settings: TargetSettings) -> Endpoint:
    """The endpoint that the options describe. Its model may still be empty.

    Raises:
        ConfigError: no cluster runs here and no URL is given, or an option is invalid.
    """
    server = find_endpoint(settings.url)
    # The key of this machine's cluster is not for servers elsewhere.
    api_key = settings.api_key or (os.environ.get(API_KEY_VARIABLE) if settings.url is None else None)
    # find_endpoint removes /v1. A server behind a gateway may have another prefix; a bare host gets /v1 again.
    is_bare = urlsplit(server).path == ""
    base_url = f"{server}/v1" if is_bare or (settings.url or "").rstrip("/").endswith("/v1") else server
    try:
        extra = orjson.loads(settings.extra_body or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body is not JSON: {error}.") from error
    if not isinstance(extra, dict):
        raise ConfigError('--extra-body must be a JSON object, such as {"top_p": 0.9}.')
    return Endpoint(
        base_url,
        settings.model or "",
        CHAT if settings.chat else COMPLETIONS,
        api_key,
        settings.temperature,
        settings.exact_lengths,
        service_tier=settings.service_tier,
        extra_body=extra,
    )


async def find_model(endpoint: Endpoint) -> Endpoint:
    """``endpoint`` with the named model, or else the first that the server lists, and the model's context.

    Raises:
        ConfigError: the server does not serve the named model.
        TargetError: there is no answer, or no list of models and no named model.
    """
    try:
        timeout = aiohttp.ClientTimeout(total=_LIST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(ssl=tls_context(endpoint.base_url) or True)
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=not endpoint.is_loopback) as http,
            http.get(endpoint.models_url, headers=endpoint.headers) as response,
        ):
            status, content = response.status, await response.read()
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        reason = str(error) or type(error).__name__
        raise TargetError(f"No answer from {endpoint.models_url}: {reason}. Is the server running?") from error
    if status in (401, 403):
        raise TargetError(
            f"{endpoint.models_url} answered {status}: it wants another API key. Give it with --api-key, or in "
            "BATON_BENCH_API_KEY."
        )
    served = _contexts_by_model(content) if status == 200 else {}
    if endpoint.model and served:
        name = known_name("--model", endpoint.model, served)
        return replace(endpoint, max_model_len=served[name])
    if endpoint.model:
        return endpoint
    if not served:
        raise TargetError(f"{endpoint.models_url} answered {status} and lists no model. Give its name with --model.")
    name, max_model_len = next(iter(served.items()))
    return replace(endpoint, model=name, max_model_len=max_model_len)


async def settle(endpoint: Endpoint) -> tuple[Endpoint, list[str]]:
    """Sends some requests to find the parameters that the server refuses: exact lengths, then usage.

    Returns:
        The usable endpoint, and notes on the disabled parameters for the report.

    Raises:
        TargetError: the server does not answer even the simplest request.
    """
    attempts = [(endpoint, [])] if not endpoint.exact_lengths else [
        (endpoint, []),
        (replace(endpoint, exact_lengths=False), ["the server refuses ignore_eos: answers may end early"]),
    ]  # fmt: skip
    plain, notes = attempts[-1]
    attempts.append((replace(plain, requests_usage=False), [*notes, "the server refuses stream_options"]))
    for attempt, notes in attempts:
        sample = await _send_test_request(attempt, "Hello", 2)
        if sample.is_ok:
            return attempt, notes
        if sample.error not in _REFUSED:
            break
    raise TargetError(
        f"{endpoint.generate_url} failed to answer a test request for two tokens: {sample.error}: "
        f"{sample.error_message}"
    )


async def count_prompt(endpoint: Endpoint, text: str) -> int:
    """Number of tokens of ``text`` as the server counts them.

    Raises:
        TargetError: the server does not report it.
    """
    sample = await _send_test_request(endpoint, text, 1)
    if sample.input_tokens is None:
        raise TargetError(
            f"{endpoint.generate_url} does not report usage.prompt_tokens ({sample.error or 'no usage'}), and "
            "no tokenizer was found. Give one with --tokenizer, or give --prompts."
        )
    return sample.input_tokens


async def _send_test_request(endpoint: Endpoint, text: str, output_tokens: int) -> Sample:
    sample = Sample(0.0, True, None, output_tokens)
    async with LoadClient(endpoint, _LIST_TIMEOUT_S * 4) as client:
        await client.send(RequestSpec(text, None, output_tokens), sample, time.perf_counter())
    return sample


def _contexts_by_model(content: bytes) -> dict[str, int | None]:
    """``max_model_len`` of each listed model, as baton and vLLM report it; ``None`` if missing."""
    try:
        return {str(model["id"]): _context(model.get("max_model_len")) for model in orjson.loads(content)["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


def _context(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def find_tokenizer(
    settings: TargetSettings, endpoint: Endpoint, report: Callable[[str], None]
) -> tuple[Tokenizer, str] | None:
    """The server's tokenizer and its name; ``None`` if none was named and this machine has none.

    The hub is only used for a named tokenizer.

    Raises:
        ConfigError: the tokenizer of ``--tokenizer`` cannot be loaded.
    """
    if settings.tokenizer is not None:
        try:
            return _load(settings.tokenizer, report, only_local=False), settings.tokenizer
        except BatonError as error:
            raise ConfigError(f"--tokenizer: {error.message}") from error
    for reference in filter(None, (_model_of_local_cluster(endpoint), endpoint.model)):
        with suppress(BatonError):
            return _load(reference, report, only_local=True), reference
    return None


def _load(reference: str, report: Callable[[str], None], *, only_local: bool) -> Tokenizer:
    folder = Path(reference).expanduser()
    is_tokenizer = (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file()
    path = folder if is_tokenizer else resolve_model(reference, report).path
    report(f"loading the tokenizer of {reference}")
    return Tokenizer.load(path, only_local=only_local and not folder.exists())


def _model_of_local_cluster(endpoint: Endpoint) -> str | None:
    """The configured model of the cluster on this machine, if that is the target."""
    state = read_state()
    if state is None or state.endpoint is None or f"{state.endpoint}/v1" != endpoint.base_url or not state.is_running():
        return None
    model = state.config.get("model")
    return model if isinstance(model, str) else None
