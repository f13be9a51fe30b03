"""Where the tokenizer of the target comes from, and who waits for it."""

import asyncio
import threading

import pytest
from aiohttp import web
from huggingface_hub import constants

from baton.bench import target_tokenizer
from baton.bench.endpoint import Endpoint
from baton.bench.settings import TargetSettings
from baton.bench.target_tokenizer import find_tokenizer, find_tokenizer_aside
from baton.core.errors import ConfigError
from baton.engine.models.tokenizer import Tokenizer
from tests.serving_reference import serving
from tests.tiny_tokenizers import byte_level_tokenizer

ENDPOINT = Endpoint("http://127.0.0.1:1/v1", "reference")
NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def hub_loads(monkeypatch):
    """What is loaded by a hub id, and whether the hub may be asked. Only `owner/here` is on this machine."""
    loads = []

    def load(path, *, only_local=False):
        loads.append((path, only_local))
        if only_local and path != "owner/here":
            raise OSError("there is no copy")
        return byte_level_tokenizer()

    monkeypatch.setattr(Tokenizer, "load", load)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", NOBODY)
    return loads


def settings(tokenizer):
    return TargetSettings(tokenizer=tokenizer)


def test_a_hub_that_does_not_answer_is_not_asked_for_a_minute(hub_loads):
    with pytest.raises(ConfigError) as caught:
        find_tokenizer(settings("owner/name"), ENDPOINT, lambda _: None)
    assert hub_loads == [("owner/name", True)]
    assert "--tokenizer: 'owner/name' is no folder, this machine has no copy of it" in caught.value.message
    assert "Name a folder with a tokenizer.json, or make the hub reachable" in caught.value.message


def test_without_the_hub_a_copy_will_do(hub_loads):
    found = find_tokenizer(settings("owner/here"), ENDPOINT, lambda _: None)
    assert found is not None
    assert hub_loads == [("owner/here", True)]


def test_without_the_hub_a_served_model_that_nobody_named_is_not_known(hub_loads):
    assert find_tokenizer(settings(None), Endpoint(NOBODY, "owner/name"), lambda _: None) is None


@pytest.mark.parametrize("status", [200, 404])
async def test_a_hub_that_answers_is_asked(hub_loads, monkeypatch, status):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=status)

    application = web.Application()
    application.router.add_route("*", "/{any:.*}", answer)
    async with serving(application) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        assert await asyncio.to_thread(find_tokenizer, settings("owner/name"), ENDPOINT, lambda _: None)
    assert hub_loads == [("owner/name", False)]


def test_a_hub_that_is_switched_off_is_not_asked(hub_loads, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(target_tokenizer, "urlopen", None)
    assert find_tokenizer(settings("owner/here"), ENDPOINT, lambda _: None)


def test_what_is_loaded_is_told_before(tmp_path):
    byte_level_tokenizer().save(tmp_path)
    said = []
    assert find_tokenizer(settings(str(tmp_path)), ENDPOINT, said.append)
    assert said == [f"loading the tokenizer in {tmp_path}"]


async def test_it_is_found_in_a_thread(tmp_path):
    byte_level_tokenizer().save(tmp_path)
    found = await find_tokenizer_aside(settings(str(tmp_path)), ENDPOINT, lambda _: None)
    assert found is not None
    assert found[1] == str(tmp_path)
    with pytest.raises(ConfigError, match="/nowhere"):
        await find_tokenizer_aside(settings("/nowhere"), ENDPOINT, lambda _: None)


def test_nobody_who_gives_up_waits_for_it(monkeypatch):
    begun, may_end = threading.Event(), threading.Event()

    def find(*arguments):
        begun.set()
        may_end.wait()

    monkeypatch.setattr(target_tokenizer, "find_tokenizer", find)

    async def give_up() -> None:
        finding = asyncio.create_task(find_tokenizer_aside(settings("any"), ENDPOINT, lambda _: None))
        while not begun.is_set():  # noqa: ASYNC110 - another thread's state
            await asyncio.sleep(0)
        finding.cancel()
        await asyncio.gather(finding, return_exceptions=True)

    ended = threading.Event()

    def run_all() -> None:
        with asyncio.Runner() as runner:
            runner.run(give_up())
        ended.set()

    runs = threading.Thread(target=run_all, daemon=True)
    runs.start()
    try:
        assert ended.wait(20), "the event loop waits for the thread"
        threads = [thread for thread in threading.enumerate() if thread.name == "tokenizer"]
        assert threads
        assert all(thread.daemon for thread in threads)  # else the end of the process would wait for them
    finally:
        may_end.set()
        runs.join(20)
