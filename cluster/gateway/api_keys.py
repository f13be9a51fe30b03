"""API keys: their configuration, and the lookup of the key that a request carries.

Only digests of keys are kept. A key in the configuration is replaced by its digest when it is read, so no copy of the
configuration (the record of a running cluster, arguments of actors, logs) contains it. SHA-256 without salt is enough,
since keys must be long and are meant to be random.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import model_validator

from baton.core.config_section import NonEmptyString, PositiveInt, Section
from baton.core.errors import ConfigError, InvalidApiKeyError

_SOURCES = ("key", "key_env", "key_file", "key_sha256")
_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_SALT_BYTES = 16
_DIGEST = re.compile(r"[0-9a-f]{64}")
_EXPECTED_KEY = (
    "expected 16 to 512 visible ASCII characters without spaces, such as the output of `openssl rand -hex 24`"
)


class ApiKeyConfig(Section):
    """A key of the endpoint, named by exactly one of ``key``, ``key_env``, ``key_file`` and ``key_sha256``."""

    name: NonEmptyString
    """Name of the key's owner in logs."""
    key: None = None
    """The key itself. It is replaced by ``key_sha256`` at once."""
    key_env: NonEmptyString | None = None
    """Name of an environment variable that holds the key."""
    key_file: NonEmptyString | None = None
    """A file that holds the key and nothing else."""
    key_sha256: str | None = None
    """SHA-256 of the key, in hexadecimal."""
    slo_class: str | None = None
    """SLO class of requests that choose none; null means ``slo.default``."""
    admin: bool = False
    """Allows ``/admin``, which ``baton status`` and ``baton scale`` need."""
    cache_group: NonEmptyString | None = None
    """Keys of the same group share cached prefixes; null shares them with no other key."""
    requests_per_minute: PositiveInt | None = None
    """Limit of generation requests per minute; null means no limit."""
    tokens_per_minute: PositiveInt | None = None
    """Limit of prompt and generated tokens together; null means no limit. ``max_tokens`` is not charged."""
    max_concurrent: PositiveInt | None = None
    """Limit of concurrent generation requests; null means no limit."""

    @model_validator(mode="before")
    @classmethod
    def _keep_the_digest_only(cls, values: Any) -> Any:
        if not isinstance(values, dict):  # these messages quote no value, which may be a key
            raise ValueError("each key must be a section with a name and one of key, key_env, key_file and key_sha256")
        given = [name for name in _SOURCES if values.get(name) is not None]
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(_SOURCES)}, got {' and '.join(given) or 'none'}")
        key = values.get("key")
        if key is None:
            return values
        if not isinstance(key, str) or not _KEY.fullmatch(key):
            raise ValueError(f"key is not valid; {_EXPECTED_KEY}")
        return {**values, "key": None, "key_sha256": digest_of(key)}

    @model_validator(mode="after")
    def _is_a_digest(self) -> ApiKeyConfig:
        if self.key_sha256 is not None and not _DIGEST.fullmatch(self.key_sha256):
            raise ValueError("key_sha256 must be 64 lower-case hexadecimal digits, such as the output of `sha256sum`")
        return self

    def sealed(self, folders: Sequence[Path] = ()) -> ApiKeyConfig:
        """A copy with the digest in place of the variable or the file.

        Args:
            folders: where a relative ``key_file`` is looked for; without any, in the current directory.

        Raises:
            ConfigError: the variable or file does not exist, or holds no valid key.
        """
        if self.key_sha256 is not None:
            return self
        if self.key_env is not None:
            place, text = f"the environment variable {self.key_env}", os.environ.get(self.key_env)
        else:
            place, text = _read(Path(self.key_file or ""), folders)
        if text is None or not _KEY.fullmatch(text.strip()):
            problem = "does not exist" if text is None else f"does not contain a valid key; {_EXPECTED_KEY}"
            raise ConfigError(f"router.api_keys: {place} of the key {self.name!r} {problem}.")
        return self.model_copy(update={"key_env": None, "key_file": None, "key_sha256": digest_of(text.strip())})


def _read(file: Path, folders: Sequence[Path]) -> tuple[str, str | None]:
    """The name of the source and its content, or ``None`` as the content if the file does not exist."""
    expanded = file.expanduser()
    candidates = [folder / expanded for folder in folders] or [expanded]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    if found is None:
        return f"the file {file}", None
    try:
        return f"the file {found}", found.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"router.api_keys: cannot read {found} ({type(error).__name__}); expected a readable ASCII file."
        ) from error


def digest_of(key: str) -> str:
    """SHA-256 of a key, in hexadecimal."""
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key; ``None`` disables a limit. See :mod:`cluster.gateway.access`."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrent: int | None = None


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key of the endpoint, without its secret.

    Attributes:
        slo_class: SLO class of requests that choose none; ``None`` means the default class.
        is_admin: allows ``/admin`` and the timelines of all keys.
        cache_group: keys of the same group share cached prefixes; ``None`` shares them with no other key.
    """

    name: str
    slo_class: str | None = None
    is_admin: bool = False
    limits: KeyLimits = KeyLimits()
    cache_group: str | None = None

    @property
    def owner(self) -> str:
        """A tag of the owner's name for ids of requests, which may not contain any character."""
        return digest_of(self.name)[:12]


def cache_salt_of(api_key: ApiKey | None, salt: str) -> str:
    """The cache salt of a request, which two requests have in common only if they may share cached prefixes.

    Args:
        api_key: the request's key; ``None`` if the endpoint needs no key.
        salt: the request's own ``cache_salt``; empty without one.
    """
    scope = ""
    if api_key is not None:
        scope = f"key {api_key.name}" if api_key.cache_group is None else f"group {api_key.cache_group}"
    if not scope and not salt:
        return ""
    return hashlib.blake2b(f"{scope}\0{salt}".encode(), digest_size=_SALT_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class Share:
    """One of several routers that share a limit evenly.

    Attributes:
        index: of the router, from 0.
        count: number of routers.
    """

    index: int = 0
    count: int = 1

    def of(self, limit: int | None) -> int | None:
        """This router's share, at least 1; ``None`` disables a limit."""
        return None if limit is None else max(1, limit // self.count + (self.index < limit % self.count))


class ApiKeys:
    """All keys of the endpoint. An empty set opens the endpoint to all requests.

    Args:
        share: the share of the limits that this router enforces.

    Raises:
        ConfigError: a key cannot be read, or two of them are equal.
    """

    def __init__(self, configs: Iterable[ApiKeyConfig] = (), share: Share = Share()) -> None:
        self._by_digest: dict[str, ApiKey] = {}
        for config in configs:
            sealed = config.sealed()
            digest = str(sealed.key_sha256)
            if digest in self._by_digest:
                other = self._by_digest[digest].name
                raise ConfigError(
                    f"router.api_keys: {other!r} and {config.name!r} have the same key; give each one its own."
                )
            limits = KeyLimits(
                share.of(config.requests_per_minute),
                share.of(config.tokens_per_minute),
                share.of(config.max_concurrent),
            )
            self._by_digest[digest] = ApiKey(config.name, config.slo_class, config.admin, limits, config.cache_group)

    def __len__(self) -> int:
        return len(self._by_digest)

    def become(self, other: ApiKeys) -> None:
        """Takes over the keys of ``other``."""
        self._by_digest = other._by_digest

    def named(self, name: str) -> ApiKey | None:
        """The key of an owner, if there is one."""
        return next((api_key for api_key in self._by_digest.values() if api_key.name == name), None)

    def find(self, authorization: str | None, bare_key: str | None = None) -> ApiKey:
        """The key that an ``Authorization`` header carries.

        Args:
            bare_key: a key that is used if there is no such header.

        Raises:
            InvalidApiKeyError: there is no key, or an unknown one.
        """
        if authorization is None and bare_key is not None:
            authorization = f"Bearer {bare_key}"
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise InvalidApiKeyError(
                "This endpoint needs an API key, sent as `Authorization: Bearer KEY` or `x-api-key: KEY`. Pass it to "
                "clients of OpenAI and Anthropic as api_key, and to baton's commands in the environment variable "
                "BATON_API_KEY."
            )
        found = self._by_digest.get(digest_of(key.strip()))
        if found is None:
            raise InvalidApiKeyError(
                "The API key is unknown. Ask the operator of the endpoint for a key (router.api_keys)."
            )
        return found
