"""``baton model pull``: every kind of reference, and its errors."""

import huggingface_hub
import pytest
from httpx import Request, Response
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError
from huggingface_hub.utils import filter_repo_objects

from baton.core.errors import ConfigError, ModelUnavailableError
from cluster.cli import cli, cli_model
from tests.tiny_gguf import write_gguf


def pull(name: str, **options):
    return cli_model.pull(name, lambda line: None, **options)


@pytest.fixture
def hub(monkeypatch):
    """Takes the hub's place; set ``outcome`` to a folder or an error."""

    class Hub:
        outcome: object = "/hub/folder"
        asked: tuple[str, list[str]] | None = None

        def download(self, name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> object:
            files = ["config.json", "model.safetensors", "pytorch_model.bin", "original/model.safetensors"]
            self.asked = (
                name,
                list(filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)),
            )
            if isinstance(self.outcome, Exception):
                raise self.outcome
            return self.outcome

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.download)
    return fake


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "default"])
def test_the_default_model_is_downloaded_and_verified(tmp_path, monkeypatch, name):
    calls = []
    monkeypatch.setattr(cli_model, "ensure_default_model", lambda **options: calls.append(options) or tmp_path)
    assert pull(name, verify=True) == tmp_path
    assert calls[0]["verify"] is True


def test_a_hub_model_is_downloaded_without_other_weight_formats(hub):
    assert str(pull("org/Model-1B")) == "/hub/folder"
    assert hub.asked == ("org/Model-1B", ["config.json", "model.safetensors"])


def response(status: int) -> Response:
    return Response(status, request=Request("GET", "https://hub.invalid/org/model"))


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (LocalEntryNotFoundError("offline"), ModelUnavailableError, "org/model is not in the local hub cache"),
        (GatedRepoError("gated", response=response(403)), ModelUnavailableError, "accept its terms"),
        (RepositoryNotFoundError("404", response=response(404)), ConfigError, "The hub has no model org/model"),
        (HfHubHTTPError("500 oh no\nmore", response=response(500)), ModelUnavailableError, "from the hub: 500 oh no$"),
        (OSError(28, "No space left on device"), ModelUnavailableError, "No space left"),
    ],
)
def test_a_hub_error_becomes_one_message(hub, error, expected, message):
    hub.outcome = error
    with pytest.raises(expected, match=message):
        pull("org/model")


@pytest.mark.thorough(covered_by="tests/unit/baton/engine/models/test_gguf_cache.py::test_a_file_is_converted_once")
def test_a_gguf_file_is_converted(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BATON_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "tiny.gguf")
    assert cli.run(["model", "pull", str(tmp_path / "tiny.gguf")]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(str(tmp_path / "cache" / "models" / "gguf-tiny-"))
    assert "converting tiny.gguf" in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "not a hub id of the form owner/name"),
        (["missing.gguf"], "cannot read the GGUF file missing.gguf: No such file"),
        (["org/model", "--verify"], "--verify works with the default model only"),
    ],
)
def test_a_model_that_cannot_be_downloaded_is_an_error(arguments, message, capsys):
    assert cli.run(["model", "pull", *arguments]) == 1
    assert message in capsys.readouterr().err
