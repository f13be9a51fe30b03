"""The page shows the engine's rounds: tokens, drafts and verdicts of every method, as chains and as trees.

The page's modules run in Chromium without a cluster, on traces of tiny models, and what they drew is read back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, Route, expect

from baton.core.rounds import Round, RoundLog
from cluster.config.worker_config import SpeculationConfig
from cluster.gateway.openai.rounds import describe_rounds
from tests.browser import chromium, needs_chromium
from tests.method_drafts import TREES
from tests.round_labs import METHODS, NAMES, Lab, requests_of
from tests.tiny_tokenizers import byte_level_tokenizer

pytestmark = needs_chromium

Json = dict[str, Any]

STATIC = Path(__file__).parents[2] / "cluster" / "gateway" / "page" / "static"
ORIGIN = "http://127.0.0.1:1"
TOKENIZER = byte_level_tokenizer()
HOSTILE = '<img src=x onerror="window.broken = 1"><b>bold</b>'
OPEN = """async (trace) => {
  const { RoundsView } = await import("/page/rounds_view.js");
  window.view = new RoundsView(trace);
  document.body.replaceChildren(window.view.node);
}"""
READ = """() => {
  const of = (item, kind) => item.querySelector(`:scope > ${kind}, :scope > .pair > ${kind}`);
  const isTree = document.querySelector(".tree") !== null;
  const items = [...document.querySelectorAll(".draft li")];
  const drafted = items.filter((item) => "node" in item.dataset);
  drafted.sort((one, other) => one.dataset.node - other.dataset.node);
  const above = (item) => item.parentElement.closest("li")?.dataset.node ?? -1;
  const parent = (item) => Number(isTree ? above(item) : item.dataset.node - 1);
  const verdict = (item) => of(item, ".verdict").textContent;
  const token = (item, kind) => Number(of(item, `.token.${kind}`).dataset.token);
  const accepted = drafted.filter((item) => verdict(item) === "accepted");
  const own = items
    .filter((item) => of(item, ".token.made[data-token]"))
    .map((item) => [token(item, "made"), verdict(item)]);
  const made = isTree ? [...accepted.map((item) => [token(item, "drafted"), "accepted"]), ...own] : own;
  return {
    isTree,
    draft: drafted.map((item) => [token(item, "drafted"), parent(item), accepted.includes(item)]),
    made,
    text: document.querySelector(".context mark").textContent,
    headline: document.querySelector(".headline").textContent,
  };
}"""
READ_ALL = f"""(count) => [...Array(count).keys()].map((index) => {{ window.view.show(index); return ({READ})(); }})"""


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page that has nothing but the modules and styles of baton's page."""

    def answer(route: Route) -> None:
        name = route.request.url.removeprefix(f"{ORIGIN}/page/")
        if name.startswith("http"):
            route.fulfill(body="<!doctype html><title>rounds</title>", content_type="text/html")
        else:
            route.fulfill(path=STATIC / name)

    with chromium() as browser:
        opened = browser.new_page()
        opened.route("**/*", answer)
        opened.goto(f"{ORIGIN}/")
        yield opened


def trace_of(rounds: Iterable[Round]) -> Json:
    log = RoundLog()
    for one in rounds:
        log.add(one)
    return describe_rounds(log, TOKENIZER)


@pytest.mark.parametrize(("method", "config"), METHODS, ids=NAMES)
def test_the_page_shows_the_rounds_of_the_engine(
    method: str, config: SpeculationConfig, tmp_path: Path, page: Page
) -> None:
    lab = Lab(method, config, tmp_path)
    num_trees = 0
    for request in lab.run(requests_of("traced", traced=True)):
        rounds = lab.check(request)  # equal to what a witness saw in the engine
        page.evaluate(OPEN, trace_of(rounds))
        for number, (found, one) in enumerate(zip(page.evaluate(READ_ALL, len(rounds)), rounds, strict=True), 1):
            nodes = enumerate(zip(one.draft, one.parents, strict=True))
            assert found["draft"] == [[token, parent, node in one.accepted] for node, (token, parent) in nodes]
            verdicts = zip(one.token_ids, map(str, one.verdicts), strict=True)
            assert found["made"][: len(one.token_ids)] == [[token, verdict] for token, verdict in verdicts]
            assert found["text"] == "".join(map(TOKENIZER.token_text, one.token_ids))
            assert found["headline"].startswith(f"Round {number} of {len(rounds)}: {one.method or 'no draft'}, ")
            num_trees += found["isTree"]
    assert num_trees > 0 or config is not TREES


def two_rounds(text: str) -> Json:
    """A tree whose second branch is accepted, and then a chain that the model corrects; all tokens have this text."""
    tree = Round((7, 8, 9), "lookahead", (5, 7, 8), (-1, -1, 1), (1, 2), 0.0021, 0.0304, 3)
    chain = Round((4, 2), "ngram", (4, 6), (-1, 0), (0,), 0.0, 0.012)
    trace = trace_of((tree, chain))
    for one in trace["rounds"]:
        for part in (one["draft"], one["output"]):
            part["texts"] = [text for _ in part["texts"]]
    return trace


def test_rounds_are_stepped_by_keyboard_and_mouse(page: Page) -> None:
    page.evaluate(OPEN, two_rounds(" a"))
    headline = page.locator(".headline")
    expect(headline).to_have_text("Round 1 of 2: lookahead, 2 of 3 drafted accepted, 3 tokens")
    expect(page.locator(".tree > li").nth(1)).to_have_text("␣aaccepted␣aaccepted␣abonus")
    expect(page.locator(".times")).to_have_text("drafting 2.1 ms" + "verification 30.4 ms" + "3 sequences in the step")
    page.get_by_role("button", name="Next round").click()
    expect(headline).to_have_text("Round 2 of 2: ngram, 1 of 2 drafted accepted, 2 tokens")
    assert page.locator(".chain .verdict").all_text_contents() == ["accepted", "recovered"]
    page.keyboard.press("ArrowLeft")
    expect(headline).to_contain_text("Round 1 of 2")
    page.get_by_role("slider", name="Round").focus()
    page.keyboard.press("End")
    expect(headline).to_contain_text("Round 2 of 2")
    page.get_by_role("button", name="Play").click()
    expect(headline).to_contain_text("Round 1 of 2")  # from the first one, after the last
    expect(page.get_by_role("button", name="Pause")).to_be_visible()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("button", name="Play")).to_be_visible()


@pytest.mark.parametrize("reduced", ["reduce", "no-preference"])
def test_played_rounds_move_only_where_motion_is_wanted(page: Page, reduced: Any) -> None:
    page.emulate_media(reduced_motion=reduced)
    page.add_style_tag(path=STATIC / "rounds.css")
    page.evaluate(OPEN, two_rounds("a"))
    page.evaluate("window.view.replay()")
    num_animations = page.evaluate("document.getAnimations().length")
    assert (num_animations > 0) == (reduced == "no-preference")


def test_text_of_tokens_is_never_html(page: Page) -> None:
    page.evaluate(OPEN, two_rounds(HOSTILE))
    expect(page.locator(".token").first).to_have_text(HOSTILE.replace(" ", "␣"))
    expect(page.locator(".context mark")).to_have_text(HOSTILE * 3)
    assert page.locator("img, b").count() == 0
    assert page.evaluate("window.broken") is None
