"""The tokenizer of the target, as far as this machine or the hub has it."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from baton.bench.endpoint import Endpoint
from baton.bench.settings import TargetSettings
from baton.client.local_cluster import read_state
from baton.core.errors import BatonError, ConfigError
from baton.engine.models.model_source import is_hub_id, resolve_model
from baton.engine.models.tokenizer import Tokenizer

_HUB_TIMEOUT_S = 5.0
FoundTokenizer = tuple[Tokenizer, str]


def find_tokenizer(
    settings: TargetSettings, endpoint: Endpoint, report: Callable[[str], None]
) -> FoundTokenizer | None:
    """The server's tokenizer and its name; None when none was named and none is found.

    Raises:
        ConfigError: ``--tokenizer`` names nothing that can be loaded.
    """
    if settings.tokenizer is not None:
        try:
            return _load(settings.tokenizer, report), settings.tokenizer
        except (OSError, ValueError) as error:
            raise ConfigError(f"--tokenizer: nothing to load in {settings.tokenizer!r}: {error}") from error
    for reference in filter(None, (_model_of_local_cluster(endpoint), endpoint.model)):
        try:
            return _load(reference, report), reference
        except (BatonError, OSError, ValueError):
            continue
    return None


async def find_tokenizer_aside(
    settings: TargetSettings, endpoint: Endpoint, report: Callable[[str], None]
) -> FoundTokenizer | None:
    """:func:`find_tokenizer` in a thread, for it imports and reads for seconds. Who cancels this, and even a process
    that ends, does not wait for it, as both would for a thread of the event loop's own."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[FoundTokenizer | None] = loop.create_future()

    def settle(found: FoundTokenizer | None, error: BaseException | None) -> None:
        if outcome.done():
            return
        if error is None:
            outcome.set_result(found)
        else:
            outcome.set_exception(error)

    def find() -> None:
        found, failure = None, None
        try:
            found = find_tokenizer(settings, endpoint, report)
        except BaseException as error:  # noqa: BLE001 - raised where it is awaited
            failure = error
        with suppress(RuntimeError):  # nobody waits any more, and the loop is closed
            loop.call_soon_threadsafe(settle, found, failure)

    threading.Thread(target=find, name="tokenizer", daemon=True).start()
    return await outcome


def _load(reference: str, report: Callable[[str], None]) -> Tokenizer:
    folder = Path(reference).expanduser()
    if (folder / "tokenizer.json").is_file() or (folder / "tokenizer_config.json").is_file():
        report(f"loading the tokenizer in {folder}")
        return Tokenizer.load(folder)
    path = resolve_model(reference, report).path
    report(f"loading the tokenizer of {reference}")
    if folder.exists() or not is_hub_id(path):
        return Tokenizer.load(path)
    is_reachable = _hub_answers()
    try:
        return Tokenizer.load(path, only_local=not is_reachable)
    except OSError as error:
        if is_reachable:
            raise
        raise ConfigError(
            f"--tokenizer: {reference!r} is no folder, this machine has no copy of it, and the hub does not answer. "
            "Name a folder with a tokenizer.json, or make the hub reachable (HF_ENDPOINT, HTTPS_PROXY, HF_HUB_OFFLINE)."
        ) from error


def _hub_answers() -> bool:
    """Asked once and for seconds: the hub's own client tries for a minute before it gives up."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=_HUB_TIMEOUT_S).close()
    except HTTPError:
        return True
    except URLError as error:
        return isinstance(error.reason, ssl.SSLError)  # somebody is there; the client may know more certificates
    except (OSError, HTTPException):
        return False
    return True


def _model_of_local_cluster(endpoint: Endpoint) -> str | None:
    """What the cluster that ``baton up`` runs here was told to serve, if it is the target."""
    state = read_state()
    if state is None or state.endpoint is None or f"{state.endpoint}/v1" != endpoint.base_url or not state.is_running():
        return None
    model = state.config.get("model")
    return model if isinstance(model, str) else None
