"""A headless Chromium, driven by Playwright: Debian's package, since Playwright's own build is another download."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, sync_playwright

_NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """The path of a Chromium. Skips the test if there is none."""
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.skip(f"no Chromium is installed ({', '.join(_NAMES)})")
    return found


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser that resolves no names, so that a page that needs the network fails."""
    executable = find_chromium()
    # Without a namespace of its own a sandbox does not start for root, as in a container.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=[*arguments, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        )
        try:
            yield browser
        finally:
            browser.close()
