"""A gateway over real HTTP in front of a fake router. Test files that need another gateway have their own fixtures."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import pytest

from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import TEXT, FakeAdmin, FakeGenerator, say, serve
from tests.waiting import TIMEOUT_S

TOKENIZER = byte_level_tokenizer()


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator(TOKENIZER, say(TOKENIZER, TEXT, cached=16))


@pytest.fixture
def admin() -> FakeAdmin:
    return FakeAdmin()


@pytest.fixture
async def http(generator: FakeGenerator, admin: FakeAdmin) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(generator, TOKENIZER, admin, GatewayLimits())
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as client:
        yield client
