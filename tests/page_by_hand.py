"""The page in a browser, to look at: ``python -m tests.page_by_hand [--help]``.

``pictures`` takes screenshots of every part at three sizes, light and dark. ``memory`` leaves the part Cluster open and
prints the browser's memory.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from playwright.sync_api import Page

from tests.browser import chromium

SIZES = {"phone": (390, 844), "desktop": (1280, 900), "wall": (2560, 1440)}
_TIMEOUT_MS = 120_000


def take_pictures(endpoint: str, folder: Path) -> None:
    """Writes ``PART-SIZE-SCHEME.png`` for each."""
    folder.mkdir(parents=True, exist_ok=True)
    with chromium() as browser:
        for size, (width, height) in SIZES.items():
            for scheme in ("light", "dark"):
                page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
                page.set_default_timeout(_TIMEOUT_MS)
                for part in ("chat", "playground", "gallery", "cluster"):
                    page.goto(f"{endpoint}/#{part}")
                    prepare(page, part)
                    page.mouse.wheel(0, -100_000)  # the answer of a chat is scrolled into view
                    page.wait_for_timeout(200)
                    page.screenshot(path=folder / f"{part}-{size}-{scheme}.png", full_page=True)
                page.close()


def prepare(page: Page, part: str) -> None:
    """Waits until the part shows something."""
    if part == "chat":
        page.locator("#prompt").fill("Why is the sky blue?")
        page.keyboard.press("Enter")
        page.locator("details.waterfall-of").wait_for()
        page.locator("details.rounds-of summary").click()
        for _ in range(3):
            page.get_by_role("button", name="Next round").last.click()
    elif part == "gallery":
        page.get_by_role("button", name="Record all").click()
        page.locator("#record-all[aria-disabled=false]").wait_for()
        page.wait_for_timeout(3000)  # until the last round has been played
    elif part == "cluster":
        page.locator("#tiles .tile").first.wait_for()
        page.wait_for_timeout(6000)  # until there are rates and lines


def watch_memory(endpoint: str, minutes: float, every_s: float) -> None:
    """Prints the heap of JavaScript in MB and the number of nodes, after a garbage collection."""
    with chromium() as browser:
        page = browser.new_page()
        page.goto(f"{endpoint}/#cluster")
        page.locator("#tiles .tile").first.wait_for()
        session = page.context.new_cdp_session(page)
        for step in range(int(minutes * 60 / every_s) + 1):
            session.send("HeapProfiler.collectGarbage")
            heap = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
            counts = session.send("Memory.getDOMCounters")
            nodes, listeners = counts["nodes"], counts["jsEventListeners"]
            sys.stdout.write(f"{step * every_s:6.0f} s  {heap:7.3f} MB  {nodes:6} nodes  {listeners:4} listeners\n")
            sys.stdout.flush()
            page.wait_for_timeout(every_s * 1e3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["pictures", "memory"])
    parser.add_argument("--endpoint", default="http://127.0.0.1:8000", help="of a running router")
    parser.add_argument("--folder", type=Path, default=Path("out/page"), help="for pictures")
    parser.add_argument("--minutes", type=float, default=10.0, help="of memory")
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two lines of memory")
    options = parser.parse_args()
    if options.what == "pictures":
        take_pictures(options.endpoint, options.folder)
    else:
        watch_memory(options.endpoint, options.minutes, options.every)


if __name__ == "__main__":
    main()
