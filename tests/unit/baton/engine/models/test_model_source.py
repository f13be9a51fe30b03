"""Every kind of model reference leads to its folder or hub id, and anything else to an error that says so."""

import pytest

from baton.core.errors import ConfigError
from baton.engine.models import model_source
from baton.engine.models.model_source import is_hub_id, resolve_model


@pytest.mark.parametrize("reference", ["smollm2-135m-instruct", "default"])
def test_the_default_model_has_a_name(tmp_path, monkeypatch, reference):
    monkeypatch.setattr(model_source, "ensure_default_model", lambda report: tmp_path)
    source = resolve_model(reference)
    assert (source.path, source.name) == (str(tmp_path), "smollm2-135m-instruct")


def test_a_local_folder_is_named_after_its_last_part(tmp_path, monkeypatch):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model(str(folder)).name == "my-model"
    monkeypatch.chdir(folder)
    assert resolve_model(".").name == "my-model"


def test_a_folder_takes_precedence_over_a_hub_id(tmp_path, monkeypatch):
    folder = tmp_path / "owner" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert resolve_model("owner/model").name == "model"
    assert is_hub_id(resolve_model("owner/other").path)


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_a_gguf_file_is_converted_and_named_after_its_stem(tmp_path, monkeypatch):
    monkeypatch.setattr(model_source, "ensure_converted", lambda path, report: tmp_path / "converted")
    source = resolve_model(str(tmp_path / "Some.Q4.gguf"))
    assert (source.path, source.name) == (str(tmp_path / "converted"), "Some.Q4")


def test_a_hub_id_is_kept():
    source = resolve_model("org/Model-1B")
    assert (source.path, source.name) == ("org/Model-1B", "org/Model-1B")


@pytest.mark.parametrize("reference", ["nonsense", "a/b/c", "./a/b", "/no/such", "~/nowhere", "a/"])
def test_anything_else_is_refused(reference):
    with pytest.raises(ConfigError, match="is not the bundled model"):
        resolve_model(reference)


def test_a_close_name_is_suggested():
    with pytest.raises(ConfigError, match=r"Did you mean smollm2-135m-instruct\?"):
        resolve_model("smollm-135m-instruct")
