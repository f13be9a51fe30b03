"""The page's files: negotiation, headers, and nothing beside them."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys, digest_of
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.gateway.page.negotiation import prefers_page
from cluster.gateway.page.page_files import PageFiles
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.fakes import FakeAdmin, FakeGenerator, say, serve
from tests.waiting import TIMEOUT_S

TOKENIZER = byte_level_tokenizer()
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"
KEY, OTHER_KEY = "k" * 16, "o" * 16
ROOT = Path(__file__).parents[5]
STATIC = ROOT / "cluster" / "gateway" / "page" / "static"


@asynccontextmanager
async def client(*, has_page: bool = True, with_keys: bool = False) -> AsyncIterator[httpx.AsyncClient]:
    keys = [
        ApiKeyConfig(name="user", key_sha256=digest_of(OTHER_KEY)),
        ApiKeyConfig(name="admin", key_sha256=digest_of(KEY), admin=True),
    ]
    app = create_app(
        FakeGenerator(TOKENIZER, say(TOKENIZER, "hi")),
        TOKENIZER,
        FakeAdmin(),
        GatewayLimits(),
        api_keys=ApiKeys(keys if with_keys else []),
        has_page=has_page,
    )
    async with serve(app) as url, httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S) as http:
        yield http


@pytest.mark.parametrize(
    ("accept", "wanted"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML ; q=0.9 , application/json;q=0.8", True),
        ("", False),
        ("*/*", False),
        ("application/json", False),
        ("application/json, text/plain, */*", False),
        ("text/html, application/json", False),
        ("text/html;q=0", False),
        ("text/html;q=what", False),
        ("text/html;q=0.5, */*", False),
    ],
)
def test_only_clients_that_rank_html_above_json_get_the_page(accept: str, *, wanted: bool) -> None:
    assert prefers_page(accept) is wanted


async def test_the_root_is_a_page_for_browsers_and_json_for_programs() -> None:
    async with client() as http:
        page, data = await http.get("/", headers={"Accept": BROWSER}), await http.get("/")
        head = await http.head("/", headers={"Accept": BROWSER})
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.text.startswith("<!doctype html>")
    assert (head.status_code, head.content) == (200, b"")
    assert data.json()["name"] == "baton"
    assert {page.headers["vary"], data.headers["vary"]} == {"Accept"}


async def test_the_page_can_be_switched_off() -> None:
    async with client(has_page=False) as http:
        assert (await http.get("/", headers={"Accept": BROWSER})).json()["name"] == "baton"
        assert (await http.get("/page/main.js")).status_code == 404


async def test_the_page_needs_no_key_and_what_it_reads_does() -> None:
    async with client(with_keys=True) as http:
        assert (await http.get("/", headers={"Accept": BROWSER})).status_code == 200
        assert (await http.get("/page/main.js")).status_code == 200
        assert (await http.get("/")).status_code == 401
        for key, status in ((None, 401), (OTHER_KEY, 403), (KEY, 200)):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            assert (await http.get("/admin/live?snapshots=1", headers=headers)).status_code == status


async def test_every_file_has_its_type_a_policy_and_an_etag() -> None:
    types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8", "svg": "image/svg+xml"}
    async with client() as http:
        for name in PageFiles().names():
            answer = await http.get(f"/page/{name}")
            suffix = name.rpartition(".")[2]
            assert answer.headers["content-type"] == types.get(suffix, "text/html; charset=utf-8")
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'self'; ")
            assert "require-trusted-types-for 'script'" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            known = await http.get(f"/page/{name}", headers={"If-None-Match": f'"other", W/{answer.headers["etag"]}'})
            assert (known.status_code, known.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    ["/page/", "/page/none.js", "/page/../page_files.py", "/page/%2e%2e/page_files.py", "/page/..%2fpage_files.py"],
)
async def test_no_path_leads_elsewhere(path: str) -> None:
    async with client() as http:
        answer = await http.send(http.build_request("GET", http.base_url.copy_with(raw_path=path.encode())))
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


def test_the_page_loads_nothing_from_elsewhere_and_parses_no_html() -> None:
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8").replace('"http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|\beval\(|innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), file
    index = (STATIC / "index.html").read_text(encoding="utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?![^>]*\ssrc=)", index)


def test_files_refer_to_files_that_exist() -> None:
    names = {file.name for file in STATIC.iterdir()}
    for file in STATIC.iterdir():
        text = file.read_text(encoding="utf-8")
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= names, file
        assert set(re.findall(r'"page/([^"]+)"', text)) <= names, file


def test_a_wheel_has_the_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(tmp_path), str(copied_sources(tmp_path))], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert {f"cluster/gateway/page/static/{file.name}" for file in STATIC.iterdir()} <= packed


def copied_sources(tmp_path: Path) -> Path:
    """A project with the packages of the page alone, so that its build is quick and leaves nothing here."""
    target = tmp_path / "project"
    page = target / "cluster" / "gateway" / "page"
    (page / "static").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        (target / name).write_bytes((ROOT / name).read_bytes())
    for folder in (target / "cluster", target / "cluster" / "gateway", page):
        (folder / "__init__.py").touch()
    for file in STATIC.iterdir():
        (page / "static" / file.name).write_bytes(file.read_bytes())
    return target
