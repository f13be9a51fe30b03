"""A page of another origin streams a chat in a real browser, if baton's configuration allows that origin.

Needs Chromium (on Debian, the package ``chromium``) and Playwright. The browser finds the names of the pages' hosts on
this machine.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import HTMLResponse

from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys, digest_of
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.origins import OriginPolicy
from cluster.requests.generation import GenerationRequest, TokenChunk
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import TEXT, FakeAdmin, FakeGenerator, say, serve

browsers = pytest.importorskip("playwright.async_api", reason="Playwright is missing: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: apt-get install chromium")

TOKENIZER = byte_level_tokenizer()
KEY = "k" * 16
FRIEND, STRANGER, NEIGHBOUR = "chat.example", "evil.example", "127.0.0.1"
OPTIONS = [f"--host-resolver-rules=MAP {FRIEND} 127.0.0.1, MAP {STRANGER} 127.0.0.1", "--no-proxy-server"]
TIMEOUT_MS = 60_000
PAGE = """<!DOCTYPE html>
<title>A chat</title>
<p id="answer"></p>
<p id="end"></p>
<script>
async function chat(endpoint, key) {
  const headers = {"Content-Type": "application/json", ...(key && {"Authorization": "Bearer " + key})};
  const body = JSON.stringify({messages: [{role: "user", content: "hello"}], max_tokens: 64, stream: true});
  const end = document.getElementById("end");
  try {
    const answer = await fetch(endpoint + "/v1/chat/completions", {method: "POST", headers, body});
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (let {value, done} = await reader.read(); !done; {value, done} = await reader.read()) {
      const events = (rest + value).split("\\n\\n");
      rest = events.pop();
      events.filter(event => event.startsWith("data: ")).forEach(show);
    }
  } catch (error) {
    end.textContent = "failed: " + error.name;
  }
}
function show(event) {
  const data = event.slice("data: ".length);
  if (data === "[DONE]") document.getElementById("end").textContent = "complete";
  else document.getElementById("answer").textContent += JSON.parse(data).choices[0].delta.content ?? "";
}
</script>
"""


@dataclass
class PausingGenerator(FakeGenerator):
    """Waits after each chunk until the page has shown the first one."""

    goes_on: asyncio.Event = field(default_factory=asyncio.Event)

    async def _play(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        async for chunk in super()._play(request):
            yield chunk
            await self.goes_on.wait()


@dataclass
class Site:
    """An endpoint, a web server with the page, and a browser."""

    generator: PausingGenerator
    endpoint: str
    page_port: str
    browser: Any

    async def open(self, host: str, key: str = "") -> Any:
        """A page of this host that asks for a chat."""
        page = await self.browser.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        await page.goto(f"http://{host}:{self.page_port}/")
        await page.evaluate("([endpoint, key]) => { chat(endpoint, key) }", [self.endpoint, key])
        return page


@asynccontextmanager
async def site(keys: ApiKeys) -> AsyncGenerator[Site]:
    pages = FastAPI()
    pages.get("/", response_class=HTMLResponse)(lambda: PAGE)
    generator = PausingGenerator(TOKENIZER, say(TOKENIZER, TEXT))
    async with serve(pages) as page_url, browsers.async_playwright() as playwright:
        port = page_url.rpartition(":")[2]
        origins = (f"http://{FRIEND}:{port}",)
        policy = OriginPolicy("127.0.0.1", (), origins)
        app = create_app(
            generator,
            TOKENIZER,
            FakeAdmin(),
            GatewayLimits(),
            api_keys=keys,
            origins=policy,
            cors_origins=origins,
        )
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        try:
            async with serve(app) as endpoint:
                yield Site(generator, endpoint, port, browser)
        finally:
            await browser.close()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("key", ["", KEY], ids=["without keys", "with a key"])
async def test_only_a_page_of_an_allowed_origin_streams_a_chat(key: str) -> None:
    async with site(ApiKeys([ApiKeyConfig(name="a", key_sha256=digest_of(KEY))] if key else [])) as opened:
        for host in (STRANGER, NEIGHBOUR):
            page = await opened.open(host, key)
            await page.wait_for_function("document.getElementById('end').textContent")
            assert await page.text_content("#end") == "failed: TypeError"
        assert opened.generator.requests == []  # the browser asked first, and was told no
        page = await opened.open(FRIEND, key)
        await page.wait_for_function("document.getElementById('answer').textContent")
        shown = await page.text_content("#answer")
        assert TEXT.startswith(shown)
        assert shown != TEXT  # the rest is not written yet
        opened.generator.goes_on.set()
        await page.wait_for_function("document.getElementById('end').textContent")
        assert await page.text_content("#end") == "complete"
        assert await page.text_content("#answer") == TEXT
