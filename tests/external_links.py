"""Checks the links of the pages to other hosts, by hand: ``python -m tests.external_links`` needs the network."""

from __future__ import annotations

import sys
from urllib.parse import urlsplit

import httpx

from tests.docs_pages import links, pages

_LOCAL = ("127.0.0.1", "localhost")
_REFUSALS = (401, 403, 429)
"""Answers of hosts that turn programs away; the page may well exist."""


def main() -> int:
    """Prints every link that is not found, and returns 1 if there is one."""
    found: dict[str, str] = {}
    for page in pages():
        for link in links(page):
            target = urlsplit(link)
            if target.scheme in ("http", "https") and target.hostname not in _LOCAL:
                found.setdefault(link, page)
    broken = 0
    with httpx.Client(follow_redirects=True, timeout=30) as client:
        for link, page in found.items():
            try:
                status = client.get(link).status_code
            except httpx.HTTPError as error:
                answer = type(error).__name__
            else:
                if status < 400:
                    continue
                answer = f"{status}{' (turned away; look by hand)' if status in _REFUSALS else ''}"
            broken += 1
            sys.stdout.write(f"{page}: {link}: {answer}\n")
    sys.stdout.write(f"{len(found)} links, {broken} without an answer\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
