"""Access by API key: which endpoints a key may use, and its limits. Without keys, access is open to all but
foreign web pages.

The limits of a key are requests per minute, tokens per minute and concurrent requests. Both rates are token buckets
that hold a minute's worth: bursts pass, a steady excess does not. Prompt tokens are taken when the prompt is tokenized,
output tokens when the answer has ended. That can leave a bucket in debt, and the key is refused until it has refilled.
Only generated tokens are charged, not ``max_tokens``; a prompt without an answer costs nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.core.errors import BatonError, PermissionDeniedError, RateLimitError
from cluster.gateway.api_keys import ApiKey, ApiKeys, KeyLimits
from cluster.gateway.bodies import drop_body
from cluster.gateway.http_edge import add_log_fields, error_answer
from cluster.gateway.origins import OriginPolicy

_OPEN_PATH = "/health"
"""Needs no key, so that load balancers can ask."""
_ADMIN_PREFIX = "/admin/"
_OPERATORS_PATHS = frozenset({"/v1/requests"})
"""Paths that show the requests of all keys."""
_STATE_KEY = "api_key"
_KEY_HEADER = "x-api-key"
"""Where Anthropic's clients send the key."""


def api_key_of(request: Request) -> ApiKey | None:
    """The API key of the request; ``None`` if the endpoint needs no key."""
    api_key: ApiKey | None = request.scope["state"].get(_STATE_KEY)
    return api_key


def inner_state(api_key: ApiKey | None) -> dict[str, Any]:
    """``scope["state"]`` of a request that the gateway makes itself, as ``api_key``. Clients cannot set a state."""
    return {_STATE_KEY: api_key}


class AccessControl:
    """Checks API keys, as a dependency of the FastAPI application.

    Args:
        open_paths: paths that need no key, besides ``/health``.
    """

    def __init__(self, keys: ApiKeys, open_paths: Collection[str] = ()) -> None:
        self._keys = keys
        self._open_paths = frozenset({_OPEN_PATH, *open_paths})

    async def check(self, request: Request) -> None:
        """Identifies the key of a request and records it in the request's state.

        Raises:
            InvalidApiKeyError: the key is missing or unknown.
            PermissionDeniedError: the path needs an admin key.
        """
        if not self._keys or request.scope["path"] in self._open_paths or _STATE_KEY in request.scope["state"]:
            return
        try:
            self._identify(request)
        except BatonError:
            await drop_body(request)
            raise

    def _identify(self, request: Request) -> None:
        api_key = self._key_of(request)
        request.scope["state"][_STATE_KEY] = api_key
        add_log_fields(request, api_key=api_key.name)
        self._check_path(request.scope["path"], api_key)

    def allows(self, request: Request) -> bool:
        """Whether the request would be accepted now: its key may have been removed while it is answered."""
        try:
            if self._keys:
                self._check_path(request.scope["path"], self._key_of(request))
        except BatonError:
            return False
        return True

    def _key_of(self, request: Request) -> ApiKey:
        return self._keys.find(request.headers.get("authorization"), request.headers.get(_KEY_HEADER))

    def _check_path(self, path: str, api_key: ApiKey) -> None:
        if (path.startswith(_ADMIN_PREFIX) or path in _OPERATORS_PATHS) and not api_key.is_admin:
            raise PermissionDeniedError(
                f"The API key {api_key.name!r} is not allowed to use {path[:80]}. Use a key with `admin: true`."
            )


class OriginGuard:
    """Middleware that answers requests with 403 that the policy refuses, while no API keys are set."""

    def __init__(self, app: ASGIApp, policy: OriginPolicy, api_keys: ApiKeys) -> None:
        self._app = app
        self._policy = policy
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._api_keys:
            request = Request(scope, receive)
            try:
                self._policy.check(request.headers.getlist("host"), request.headers.getlist("origin"))
            except BatonError as error:
                await drop_body(request)
                await error_answer(scope, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


_PER_MINUTE_S = 60.0
_NO_LIMITS = KeyLimits()


class TokenBucket:
    """
    Args:
        per_minute: the refill per minute, which is also the capacity.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.capacity = per_minute
        self._level = float(per_minute)
        self._filled_s = now_s

    def level(self, now_s: float) -> float:
        """The present content; negative if more was taken than it held."""
        passed_s = max(0.0, now_s - self._filled_s)
        self._level = min(self.capacity, self._level + self.capacity * passed_s / _PER_MINUTE_S)
        self._filled_s = max(self._filled_s, now_s)
        return self._level

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount

    def seconds_until(self, amount: float, now_s: float) -> float:
        """Seconds until the bucket holds ``amount``, or is full if ``amount`` exceeds its capacity."""
        missing = min(amount, self.capacity) - self.level(now_s)
        return max(0.0, missing * _PER_MINUTE_S / self.capacity)


@dataclass(slots=True)
class _Owner:
    """The buckets and running requests of one key."""

    limits: KeyLimits = _NO_LIMITS
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    num_running: int = 0


class Allowance:
    """One request's share of its key's limits. :meth:`release` ends it.

    Attributes:
        headers: the present ``x-ratelimit-…`` headers, named as OpenAI names them.
    """

    def __init__(self, name: str, owner: _Owner, clock: Callable[[], float]) -> None:
        self._name = name
        self._owner = owner
        self._clock = clock
        self._prompt_tokens = 0
        self._is_released = False
        owner.num_running += 1

    @property
    def headers(self) -> Mapping[str, str]:
        return _headers(self._owner, self._clock())

    def take_prompt(self, num_tokens: int) -> None:
        """Charges the tokens of the prompt.

        Raises:
            RateLimitError: too few tokens are left. A prompt larger than a minute's worth needs a full bucket.
        """
        bucket, now_s = self._owner.tokens, self._clock()
        if bucket is None:
            return
        wait_s = bucket.seconds_until(num_tokens, now_s)
        if wait_s > 0:
            raise _exceeded(
                self._name,
                "tokens",
                f"{bucket.capacity} tokens per minute; {max(0, int(bucket.level(now_s)))} are left, but the prompt has "
                f"{num_tokens}",
                wait_s,
                _headers(self._owner, now_s),
            )
        bucket.take(num_tokens, now_s)
        self._prompt_tokens += num_tokens

    def settle(self, num_output_tokens: int) -> None:
        """Charges the generated tokens. If there are none, refunds those of the prompt."""
        if self._owner.tokens is not None:
            self._owner.tokens.take(num_output_tokens or -self._prompt_tokens, self._clock())

    def release(self) -> None:
        """Ends the request's share. Idempotent."""
        if not self._is_released:
            self._is_released = True
            self._owner.num_running -= 1


class KeyLimiter:
    """Enforces the limits of all keys.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._owners: dict[str, _Owner] = {}

    def admit(self, api_key: ApiKey | None) -> Allowance | None:
        """Admits a request, before any work for it. Returns ``None`` if its key has no limits.

        Raises:
            RateLimitError: a limit is reached. A refused request is not charged.
        """
        if api_key is None or api_key.limits == _NO_LIMITS:
            return None
        now_s, owner = self._clock(), self._owner(api_key)
        limits, requests, tokens = owner.limits, owner.requests, owner.tokens
        headers = _headers(owner, now_s)
        if limits.max_concurrent is not None and owner.num_running >= limits.max_concurrent:
            text = f"{limits.max_concurrent} concurrent requests, and that many are running"
            raise _exceeded(api_key.name, "concurrency", text, 1.0, headers)
        if requests is not None and (wait_s := requests.seconds_until(1, now_s)) > 0:
            text = f"{requests.capacity} requests per minute, and they are used up"
            raise _exceeded(api_key.name, "requests", text, wait_s, headers)
        if tokens is not None and (wait_s := tokens.seconds_until(1, now_s)) > 0:
            text = f"{tokens.capacity} tokens per minute, and they are used up"
            raise _exceeded(api_key.name, "tokens", text, wait_s, headers)
        if requests is not None:
            requests.take(1, now_s)
        return Allowance(api_key.name, owner, self._clock)

    def _owner(self, api_key: ApiKey) -> _Owner:
        owner = self._owners.setdefault(api_key.name, _Owner())
        if owner.limits != api_key.limits:
            now_s, owner.limits = self._clock(), api_key.limits
            owner.requests = _resized(owner.requests, api_key.limits.requests_per_minute, now_s)
            owner.tokens = _resized(owner.tokens, api_key.limits.tokens_per_minute, now_s)
        return owner


def _resized(bucket: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
    """A bucket of another size with the content of ``bucket``, as far as it fits."""
    if per_minute is None:
        return None
    resized = TokenBucket(per_minute, now_s)
    if bucket is not None:
        resized.take(max(0.0, per_minute - bucket.level(now_s)), now_s)
    return resized


def _exceeded(name: str, reason: str, limit: str, wait_s: float, headers: Mapping[str, str]) -> RateLimitError:
    return RateLimitError(
        f"The API key {name!r} is limited to {limit}. Try again in {max(1, math.ceil(wait_s))} s, or ask the "
        "operator of the endpoint for a higher limit (router.api_keys).",
        retry_after_s=wait_s,
        reason=reason,
        headers=headers,
    )


def _headers(owner: _Owner, now_s: float) -> dict[str, str]:
    headers: dict[str, str] = {}
    for kind, bucket in (("requests", owner.requests), ("tokens", owner.tokens)):
        if bucket is not None:
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.capacity)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, int(bucket.level(now_s))))
            headers[f"x-ratelimit-reset-{kind}"] = _duration(bucket.seconds_until(bucket.capacity, now_s))
    return headers


def _duration(seconds: float) -> str:
    """A duration in OpenAI's notation: ``250ms``, ``6s``, ``1m30s``."""
    if seconds < 1:
        return f"{round(seconds * 1e3)}ms"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
