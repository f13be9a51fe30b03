"""A headless Chromium, driven by Playwright: Debian's package, since Playwright's own build is another download."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is missing: apt-get install chromium")


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that resolves no names, so that a page that needs the network fails.

    While it is open, no event loop can run in this thread, because Playwright's own does.
    """
    # Without a namespace of its own a sandbox does not start for root, as in a container.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    arguments.append("--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()
