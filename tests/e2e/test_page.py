"""The page at ``/`` in a browser: every part by mouse and keyboard, on a real cluster, without a network."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, BrowserContext, Page, Route, expect

from baton.core.roles import DRAFT_METHODS, POOLS
from cluster.autoscaling.advice import advise
from cluster.gateway.api_keys import ApiKeyConfig, ApiKeys, digest_of
from cluster.gateway.gateway import create_app
from cluster.gateway.openai.plan import GatewayLimits
from cluster.telemetry.speculation_report import speculation_advice
from tests.browser import chromium, needs_chromium
from tests.e2e.conftest import EXACT
from tests.running_cluster import RunningCluster, wait_for
from tests.tiny_tokenizers import byte_level_tokenizer
from tests.unit.cluster.autoscaling.scenarios import COSTS, demand
from tests.unit.cluster.fakes import FakeAdmin, FakeGenerator, say, serve
from tests.unit.cluster.telemetry.test_speculation_report import method, stats_of

SETTINGS = EXACT

pytestmark = needs_chromium

HOSTILE = '<img src=x onerror="window.broken = 1"><script>window.broken = 1</script>&lt;b&gt;'
KEY = "k" * 16
_TIMEOUT_MS = 60_000


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as found:
        yield found


@contextmanager
def opened(browser: Browser, endpoint: str, part: str = "", **options: Any) -> Iterator[Page]:
    """A page in a context of its own, which fails on any error and on any request to elsewhere."""
    context: BrowserContext = browser.new_context(**options)
    context.set_default_timeout(_TIMEOUT_MS)
    expect.set_options(timeout=_TIMEOUT_MS)
    page = context.new_page()
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("request", lambda request: request.url.startswith(endpoint) or problems.append(request.url))
    page.goto(f"{endpoint}/{part}")
    try:
        yield page
        assert problems == []
    finally:
        context.close()


def evaluate(page: Page, expression: str) -> Any:
    """The value of a JavaScript expression, past the page's policy, which forbids what ``Page.evaluate`` does."""
    session = page.context.new_cdp_session(page)
    options = {"expression": expression, "awaitPromise": True, "returnByValue": True}
    answer = session.send("Runtime.evaluate", options)
    session.detach()
    return answer["result"].get("value")


@pytest.fixture
def page(cluster: RunningCluster, browser: Browser) -> Iterator[Page]:
    with opened(browser, cluster.endpoint) as found:
        yield found


def test_a_chat_by_keyboard_shows_its_waterfall(page: Page) -> None:
    expect(page.locator("#served")).to_have_text("smollm2-135m-instruct")
    page.get_by_label("SLO class").select_option("interactive")
    unavailable = page.locator("#method option:disabled")
    missing = set(DRAFT_METHODS) - {"eagle3"}
    expect(unavailable).to_have_count(len(missing))
    assert set(unavailable.all_text_contents()) == {f"{name} (no draft is loaded)" for name in missing}
    page.get_by_label("Speculation").select_option("suffix")
    page.get_by_label("Most tokens").fill("24")
    page.get_by_label("Message").focus()
    page.keyboard.type("What is the capital of France?")
    page.keyboard.press("Enter")
    shown = page.locator("details.waterfall-of")
    expect(shown.locator("table.waterfall tbody tr").filter(has_text="Prefill").first).to_be_visible()
    names = shown.locator("table.waterfall tbody th").all_text_contents()
    assert {"Tokenize", "Prefill", "KV transfer", "First decode", "Decode"} <= set(names)
    expect(shown.get_by_role("heading", name="Why it took this long")).to_be_visible()
    expect(shown.get_by_role("heading", name="Routes considered")).to_be_visible()
    expect(shown.locator("tr.chosen")).to_contain_text("prefill-1 → decode-1")
    expect(shown).to_contain_text("interactive")
    expect(page.locator(".said.model .bubble")).not_to_be_empty()
    page.get_by_label("Message").fill("And of Italy?")
    page.get_by_role("button", name="Send").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    expect(page.locator("details.waterfall-of")).to_have_count(2)
    expect(page.get_by_label("Message")).to_be_focused()
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_the_rounds_of_an_answer_are_those_of_the_engine(page: Page) -> None:
    page.get_by_label("Speculation").select_option("eagle3")
    page.get_by_label("Most tokens").fill("16")
    page.get_by_label("Message").fill("Repeat these words: red green blue red green blue.")
    with page.expect_response("**/timeline") as caught:
        page.keyboard.press("Enter")
    rounds = caught.value.json()["speculation"]["rounds"]
    page.locator(".rounds-of summary").focus()
    page.keyboard.press("Enter")
    page.get_by_role("slider", name="Round").focus()
    shown = page.locator(".rounds")
    for number, one in enumerate(rounds, 1):
        expect(shown.locator(".headline")).to_contain_text(f"Round {number} of {len(rounds)}: ")
        nodes = shown.locator(".draft li[data-node]")
        tokens = [int(node.locator(".drafted").first.get_attribute("data-token") or "") for node in nodes.all()]
        assert sorted(tokens) == sorted(one["draft"]["token_ids"])
        assert shown.locator(".draft .accepted[data-node]").count() == sum(one["draft"]["accepted"])
        assert shown.locator("mark").text_content() == "".join(one["output"]["texts"])
        page.keyboard.press("ArrowRight")
    assert any(one["draft"]["token_ids"] for one in rounds)


def test_the_gallery_records_the_served_model(page: Page) -> None:
    page.get_by_role("link", name="Gallery").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Gallery")).to_be_focused()
    cards = page.locator(".method")
    expect(cards).to_have_count(7)
    expect(cards.filter(has_text="Medusa").locator(".missing")).to_contain_text("speculation.draft: ")
    expect(page.get_by_role("button", name="Record medusa")).to_have_count(0)
    page.get_by_role("button", name="Record eagle3").focus()
    page.keyboard.press("Enter")
    card = page.get_by_role("region", name="EAGLE-3")
    expect(card.locator(".gain")).to_contain_text("a token, without drafts")
    expect(card.locator(".headline")).to_contain_text("eagle3, ")
    expect(card.locator(".draft .drafted").first).to_be_visible()
    page.locator("#record-all").focus()
    for _ in range(2):
        page.keyboard.press("Enter")
        expect(page.locator("#record-all")).to_be_disabled()
        expect(card.get_by_role("button", name="Record eagle3")).to_be_disabled()


def test_an_answer_can_be_stopped_and_an_error_is_shown(page: Page) -> None:
    page.get_by_label("Most tokens").fill("2000")
    page.get_by_label("Message").fill("Count to one thousand.")
    page.get_by_role("button", name="Send").click()
    expect(page.locator(".state")).to_have_text("Answering …")
    page.get_by_role("button", name="Stop").click()
    expect(page.locator(".state")).to_have_text(re.compile(r"Stopped after \d+ tokens in .* the first after "))
    expect(page.locator("details.waterfall-of")).to_have_count(1)
    half = page.locator(".model > .bubble").text_content()
    page.get_by_label("Seed").fill(str(10**20))
    page.get_by_label("Message").fill("Hello")
    with page.expect_request("**/v1/chat/completions") as caught:
        page.keyboard.press("Enter")
    expect(page.get_by_role("alert").filter(has_text="seed")).to_be_visible()
    messages = caught.value.post_data_json["messages"]
    assert [message["content"] for message in messages] == ["Count to one thousand.", half, "Hello"]


def test_a_wrong_setting_is_shown_even_if_the_settings_are_folded_away(page: Page) -> None:
    temperature = page.locator("#temperature")
    temperature.fill("-1")
    page.locator("#settings summary").click()
    expect(temperature).to_be_hidden()
    page.get_by_label("Message").fill("Hello")
    page.keyboard.press("Enter")
    expect(temperature).to_be_focused()
    expect(page.locator(".turn")).to_have_count(0)


def test_text_of_users_and_models_is_never_html(page: Page) -> None:
    def answer(route: Route) -> None:
        chunk = {"choices": [{"index": 0, "delta": {"content": HOSTILE, "reasoning_content": HOSTILE}}]}
        body = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        route.fulfill(body=body, headers={"Content-Type": "text/event-stream", "X-Request-Id": HOSTILE[:20]})

    page.route("**/v1/chat/completions", answer)
    page.get_by_label("Message").fill(HOSTILE)
    page.keyboard.press("Enter")
    expect(page.locator(".user .bubble")).to_have_text(HOSTILE)
    expect(page.locator(".model > .bubble")).to_have_text(HOSTILE)
    expect(page.locator(".thoughts .bubble")).to_have_text(HOSTILE)
    assert page.locator("#turns img, #turns script, #turns b").count() == 0
    assert evaluate(page, "window.broken") is None
    refused = "try { document.body.innerHTML = '<b>x</b>'; 'set' } catch (error) { error.name }"
    assert evaluate(page, refused) == "TypeError"  # the browser itself would refuse it


@pytest.mark.parametrize("part", ["#main", "#nothing", "#chat?x=1"])
def test_a_page_that_begins_at_an_unknown_part_shows_the_chat(
    browser: Browser, cluster: RunningCluster, part: str
) -> None:
    with opened(browser, cluster.endpoint, part) as page:
        expect(page.get_by_label("Message")).to_be_visible()
        expect(page.locator(".view:visible")).to_have_count(1)


def test_addresses_that_somebody_typed_break_nothing(page: Page, cluster: RunningCluster) -> None:
    page.goto(f"{cluster.endpoint}/#constructor")
    expect(page).to_have_title("Chat · baton")
    expect(page.locator("#chat")).to_be_visible()
    page.goto(f"{cluster.endpoint}/#request/%")
    expect(page).to_have_title("Request · baton")
    expect(page.locator("#request")).to_contain_text("There is no timeline of the request '%'")


def test_the_playground_follows_its_sliders(page: Page) -> None:
    page.get_by_role("link", name="Playground").click()
    speedups = page.locator("#values tbody td:nth-child(3)")
    page.get_by_text("All values as a table").click()
    assert speedups.all_text_contents()[:8] == ["1.48", "1.68", "1.75", "1.73", "1.68", "1.61", "1.53", "1.45"]
    expect(page.locator("#finding")).to_contain_text("Best: k = 3, 1.75×")
    expect(page.locator("#values tr").nth(5)).to_contain_text("2.94")
    page.get_by_label("Acceptance α").focus()
    page.keyboard.press("Home")
    expect(page.locator("#finding")).to_contain_text("Do not speculate")
    expect(page.locator("#rules tr[aria-current]")).to_contain_text("do not speculate")
    page.keyboard.press("End")
    expect(page.locator("#finding")).to_contain_text("5 to 7")
    page.get_by_label("Draft cost c").focus()
    page.keyboard.press("Home")
    expect(page.locator("#finding")).to_contain_text("Best: k = 16")


def test_the_playground_shows_the_drafts_of_this_cluster(page: Page, cluster: RunningCluster) -> None:
    repeated = "one two three four " * 24
    cluster.complete(repeated, max_tokens=96, ignore_eos=True, speculation={"method": "suffix"})
    fresh = f"{cluster.endpoint}/admin/advise"  # the page takes an older answer too
    page.route("**/admin/advise*", lambda route: route.continue_(url=fresh))
    page.get_by_role("link", name="Playground").focus()
    page.keyboard.press("Enter")
    page.get_by_label("Drafts of").select_option("decode-1: suffix")
    [entry] = [one for one in cluster.get("/admin/advise")["speculation"] if one["method"] == "suffix"]
    positions = page.locator("#drafts-positions tbody")
    expect(positions.locator("tr")).to_have_count(len(entry["acceptance"]))
    expect(positions.locator("tr").first.locator("td").last).to_have_text(str(entry["judged"][0]))
    expect(page.locator("#drafts-kinds tbody tr").filter(has_text="short prompt, 0-0.25")).to_have_count(1)
    expect(page.locator("#drafts-batches tbody tr").first).to_contain_text("1")
    expect(page.locator("#drafts-advice li").first).to_have_text(entry["advice"])


def test_measured_curves_are_drawn_over_the_formula(page: Page) -> None:
    entry = speculation_advice("decode-7", stats_of(method(deeper=0.5)))
    verdict = advise(demand(20), dict.fromkeys(POOLS, COSTS), dict.fromkeys(POOLS, 4))
    answer = {"speculation": entry, "disaggregation": verdict.to_dict()["disaggregation"]}
    page.route("**/admin/advise*", lambda route: route.fulfill(json=answer))
    page.get_by_role("link", name="Playground").click()
    expect(page.locator("#speedup-chart .measured circle")).to_have_count(16)
    expect(page.locator("#drafts-advice")).to_contain_text("Acceptance falls with depth")
    page.get_by_role("button", name="Set α and c to its figures").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#cost-value")).to_have_text("0.15")
    expect(page.locator("#alpha-value")).to_have_text(f"{entry[0]['alpha']:.2f}")
    page.get_by_role("link", name="Cluster").click()
    expect(page.locator("#worth-text")).to_have_text(answer["disaggregation"]["text"])
    expect(page.locator("#worth-figures tbody tr")).to_have_count(len(answer["disaggregation"]["figures"]))


def test_the_cluster_is_shown_and_changed(page: Page, cluster: RunningCluster) -> None:
    cluster.complete("Once upon a time", max_tokens=4)
    page.get_by_role("link", name="Cluster").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#live-state")).to_have_text("Live")
    for part in ("prefill", "decode"):
        expect(page.get_by_role("region", name=f"{part} pool")).to_contain_text(f"{part}-")
    expect(page.locator("#classes tbody tr").filter(has_text="standard")).to_contain_text("3 s")
    expect(page.locator("#plan .decisions li")).to_have_count(2)
    expect(page.locator("#worth-figures tbody tr").first).to_contain_text("Requests in the last five minutes")
    pool = page.get_by_role("region", name="decode pool")
    pool.get_by_label("Workers").focus()
    page.keyboard.press("Control+a")
    page.keyboard.type("2")
    page.keyboard.press("Enter")
    expect(pool.locator("tbody td.good")).to_have_count(2)
    pool.get_by_role("button", name="Drain one").click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("Drain 1 of decode?")
    dialog.get_by_role("button", name="Drain").click()
    expect(pool.locator("tbody tr")).to_have_count(1)
    wait_for(lambda: cluster.states() == ["ready", "ready"], "the drain")
    page.get_by_role("region", name="prefill pool").get_by_role("button", name="Move one to decode").click()
    page.get_by_role("dialog").get_by_role("button", name="Move").click()
    expect(page.locator(".note.bad")).not_to_be_empty()  # the last worker of a pool cannot move
    page.locator("#slow tbody a").first.click()
    expect(page.locator("#request-timeline table.waterfall")).to_be_visible()
    page.get_by_role("link", name="Back to the cluster").click()
    expect(page.locator("#live-state")).to_have_text("Live")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_there_are_no_serious_barriers(cluster: RunningCluster, browser: Browser, scheme: str) -> None:
    request_id = cluster.complete("a b " * 16, max_tokens=8, speculation={"method": "suffix", "trace": True})["id"]
    for part, ready in (
        ("", "#served:not(:empty)"),
        ("#playground", "#drafts-positions tbody tr"),
        ("#gallery", ".method"),
        ("#cluster", "#tiles .tile"),
        (f"#request/{request_id}", "table.waterfall ~ .rounds"),
    ):
        look = {"color_scheme": scheme, "reduced_motion": "reduce", "bypass_csp": True}  # for the checker's own script
        with opened(browser, cluster.endpoint, part, **look) as page:
            page.locator(ready).first.wait_for(state="attached")
            found = Axe().run(page).response["violations"]
        serious = [
            (violation["id"], [node["html"] for node in violation["nodes"]])
            for violation in found
            if violation["impact"] in ("serious", "critical")
        ]
        assert serious == [], part


def test_snapshots_leave_nothing_behind(page: Page, cluster: RunningCluster) -> None:
    snapshot = json.loads(
        evaluate(page, "fetch('admin/live?snapshots=1').then((answer) => answer.text())").removeprefix("data: ")
    )
    page.route("**/admin/live", lambda route: route.fulfill(
        body=f"data: {json.dumps(snapshot)}\n\n" * 200, headers={"Content-Type": "text/event-stream"}
    ))  # fmt: skip
    memory = page.context.new_cdp_session(page)
    counts = []
    for _ in range(4):
        page.get_by_role("link", name="Cluster").click()
        expect(page.locator("#live-state")).to_have_text("Not live")  # the stream has ended
        memory.send("HeapProfiler.collectGarbage")
        counts.append(memory.send("Memory.getDOMCounters"))
        page.get_by_role("link", name="Playground").click()
        expect(page.locator("#live-state")).to_have_text("Paused")
    assert counts[-1]["nodes"] <= counts[1]["nodes"] + 20
    assert counts[-1]["jsEventListeners"] <= counts[1]["jsEventListeners"]


@contextmanager
def endpoint_with_key() -> Iterator[str]:
    """A gateway without a cluster that requires a key, in a thread of its own."""
    tokenizer = byte_level_tokenizer()
    keys = ApiKeys([ApiKeyConfig(name="admin", key_sha256=digest_of(KEY), admin=True)])
    generator = FakeGenerator(tokenizer, say(tokenizer, "hi"))
    app = create_app(generator, tokenizer, FakeAdmin(), GatewayLimits(), api_keys=keys)
    started, ended = threading.Event(), threading.Event()
    urls: list[str] = []

    async def run() -> None:
        async with serve(app) as url:
            urls.append(url)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    started.wait()
    try:
        yield urls[0]
    finally:
        ended.set()
        thread.join()


def test_a_key_is_asked_for_and_kept_in_the_tab(browser: Browser) -> None:
    with endpoint_with_key() as endpoint, opened(browser, endpoint) as page:
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("requires a valid API key")
        dialog.get_by_label("Key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#served")).to_have_text("tiny/model")
        assert evaluate(page, "[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        page.reload()
        expect(page.locator("#served")).to_have_text("tiny/model")
        page.get_by_role("button", name="API key").click()
        page.get_by_role("dialog").get_by_role("button", name="Forget").click()
        expect(dialog).to_contain_text("requires a valid API key")  # the page has begun again
        assert evaluate(page, "sessionStorage.length") == 0


def test_a_key_that_is_given_later_opens_the_whole_page(browser: Browser) -> None:
    with endpoint_with_key() as endpoint, opened(browser, endpoint) as page:
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Key").fill("ключ")  # no browser sends it
        page.keyboard.press("Enter")
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key").fill("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#served")).to_contain_text("API key")
        page.get_by_label("Message").fill("Hello")
        page.keyboard.press("Enter")
        dialog.get_by_label("Key").fill(KEY)
        page.keyboard.press("Enter")
        expect(page.locator("#served")).to_have_text("tiny/model")
        expect(page.locator("#slo option", has_text="batch")).to_have_count(1)
