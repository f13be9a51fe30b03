"""API keys come from several places, are kept as digests only, and are required where configured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from baton.core.errors import ConfigError, InvalidApiKeyError
from cluster.config.config import BatonConfig, load_config
from cluster.gateway.api_keys import ApiKey, ApiKeyConfig, ApiKeys, Share, cache_salt_of, digest_of

KEY = "sk-0123456789abcdef"
OTHER = "sk-another-key-of-somebody"


def keys(*configs: dict[str, object]) -> ApiKeys:
    return ApiKeys(ApiKeyConfig.model_validate(config) for config in configs)


def test_a_key_is_found_by_its_bearer_token() -> None:
    found = keys({"name": "web", "key": KEY, "slo_class": "batch"}, {"name": "ops", "key": OTHER, "admin": True})
    assert found.find(f"Bearer {KEY}") == ApiKey("web", "batch", is_admin=False)
    assert found.find(f"bearer  {OTHER} ") == ApiKey("ops", None, is_admin=True)
    assert len(found) == 2


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xff"]
)
def test_other_headers_are_refused_without_being_quoted(header: str | None) -> None:
    with pytest.raises(InvalidApiKeyError) as caught:
        keys({"name": "web", "key": KEY}).find(header)
    assert KEY not in caught.value.message


def test_a_configured_key_is_kept_only_as_a_digest() -> None:
    config = BatonConfig.from_dict({"router": {"api_keys": [{"name": "web", "key": KEY}]}})
    for text in (repr(config), str(config), json.dumps(config.to_dict())):
        assert KEY not in text
    again = BatonConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert ApiKeys(again.router.api_keys).find(f"Bearer {KEY}").name == "web"


def test_keys_come_from_the_environment_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEB_KEY", KEY)
    (tmp_path / "ops.key").write_text(f"{OTHER}\n", encoding="ascii")
    file = tmp_path / "baton.yaml"
    file.write_text(
        "router: {api_keys: [{name: web, key_env: WEB_KEY}, {name: ops, key_file: ops.key}]}", encoding="utf-8"
    )
    config = load_config(file)
    assert [(key.key_env, key.key_file, key.key_sha256) for key in config.router.api_keys] == [
        (None, None, digest_of(KEY)),
        (None, None, digest_of(OTHER)),
    ]


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ({"key_env": "NOT_SET"}, "the environment variable NOT_SET of the key 'web' does not exist."),
        (
            {"key_env": "TOO_SHORT"},
            "the environment variable TOO_SHORT of the key 'web' does not contain a valid key; expected 16 to",
        ),
        ({"key_file": "nowhere.key"}, "the file nowhere.key of the key 'web' does not exist."),
        ({"key_file": "binary.key"}, "cannot read "),
    ],
)
def test_an_unavailable_key_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: dict[str, str], expected: str
) -> None:
    monkeypatch.setenv("TOO_SHORT", "hunter2")
    (tmp_path / "binary.key").write_bytes(b"\xff" * 20)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"router.api_keys": [{"name": "web", **key}]})
    assert expected in caught.value.message
    assert "hunter2" not in caught.value.message


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ({"name": "web"}, "give exactly one of key, key_env, key_file, key_sha256, got none"),
        ({"name": "web", "key": KEY, "key_env": "A"}, "got key and key_env"),
        ({"name": "web", "key": "short-secret"}, "key is not valid; expected 16 to 512 visible ASCII"),
        ({"name": "web", "key": 12345678901234567}, "key is not valid"),
        ({"name": "web", "key": f"{KEY} {KEY}"}, "key is not valid"),
        ({"name": "web", "key_sha256": "abc"}, "key_sha256 must be 64 lower-case hexadecimal digits"),
        ({"key": KEY}, "router.api_keys.0.name is missing"),
        ({"name": "web", "key": KEY, "slo_clas": "batch"}, "Did you mean router.api_keys.0.slo_class?"),
        (
            {"name": "web", "key": KEY, "slo_class": "gold"},
            "has the SLO class 'gold', which does not exist; choose one of interactive",
        ),
        (KEY, "router.api_keys.0: each key must be a section with a name"),
    ],
)
def test_a_wrong_key_is_explained_without_being_quoted(key: object, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        BatonConfig.from_dict({"router": {"api_keys": [key]}})
    assert expected in caught.value.message
    cause = str(caught.value.__cause__)
    for secret in (KEY, "short-secret", "12345678901234567"):
        assert secret not in caught.value.message + cause


def test_one_key_has_one_owner() -> None:
    with pytest.raises(ConfigError, match="'web' and 'ops' have the same key"):
        load_config(
            None, {"router.api_keys": [{"name": "web", "key": KEY}, {"name": "ops", "key_sha256": digest_of(KEY)}]}
        )


def test_only_keys_of_one_group_share_a_cache() -> None:
    alice, bob = ApiKey("alice"), ApiKey("bob")
    team = [ApiKey(name, cache_group="team") for name in ("carol", "dave")]
    salts = [cache_salt_of(key, salt) for key in (None, alice, bob, team[0]) for salt in ("", "a")]
    assert len(set(salts)) == len(salts)
    assert cache_salt_of(None, "") == ""
    assert cache_salt_of(team[0], "a") == cache_salt_of(team[1], "a")
    assert cache_salt_of(ApiKey("team"), "") != cache_salt_of(team[0], "")
    assert "alice" not in cache_salt_of(alice, "secret")


def test_without_keys_no_authorization_is_needed() -> None:
    assert not ApiKeys()


@pytest.mark.parametrize(("limit", "shares"), [(10, [4, 3, 3]), (3, [1, 1, 1]), (1, [1, 1, 1]), (None, [None] * 3)])
def test_several_routers_share_a_limit(limit: int | None, shares: list[int | None]) -> None:
    key = ApiKeyConfig(name="a", key_sha256=digest_of("k" * 16), max_concurrent=limit, tokens_per_minute=limit)
    for index, expected in enumerate(shares):
        limits = ApiKeys([key], Share(index, 3)).find(f"Bearer {'k' * 16}").limits
        assert (limits.max_concurrent, limits.tokens_per_minute) == (expected, expected)
        assert limits.requests_per_minute is None
