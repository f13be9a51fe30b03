"""Where the tokenizer of the target comes from."""

import pytest

from baton.bench.discovery import find_tokenizer
from baton.bench.endpoint import Endpoint
from baton.bench.settings import TargetSettings
from baton.core.errors import ConfigError
from baton.engine.models.tokenizer import Tokenizer
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
            raise ConfigError("there is no copy")
        return byte_level_tokenizer()

    monkeypatch.setattr(Tokenizer, "load", load)
    return loads


def settings(tokenizer):
    return TargetSettings(tokenizer=tokenizer)


def test_a_named_tokenizer_is_fetched_from_the_hub(hub_loads):
    assert find_tokenizer(settings("owner/name"), ENDPOINT, lambda _: None)
    assert hub_loads == [("owner/name", False)]


def test_the_served_model_is_not_fetched_from_the_hub(hub_loads):
    assert find_tokenizer(settings(None), Endpoint(NOBODY, "owner/name"), lambda _: None) is None
    assert find_tokenizer(settings(None), Endpoint(NOBODY, "owner/here"), lambda _: None)
    assert hub_loads == [("owner/name", True), ("owner/here", True)]


def test_the_error_names_a_tokenizer_that_cannot_be_loaded():
    with pytest.raises(ConfigError, match="/nowhere"):
        find_tokenizer(settings("/nowhere"), ENDPOINT, lambda _: None)


def test_a_folder_is_reported_before_it_is_loaded(tmp_path):
    byte_level_tokenizer().save(tmp_path)
    said = []
    assert find_tokenizer(settings(str(tmp_path)), ENDPOINT, said.append)
    assert said == [f"loading the tokenizer of {tmp_path}"]
