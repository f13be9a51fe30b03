"""Whether a client wants a page or JSON."""

from __future__ import annotations

_PAGE = "text/html"
_DATA = ("application/json", "application/*", "*/*")


def prefers_page(accept: str) -> bool:
    """Whether ``Accept`` ranks HTML above JSON, as browsers do when they navigate. Programs get JSON.

    Args:
        accept: the header's value; empty if there is none.
    """
    ranks: dict[str, float] = {}
    for part in accept.lower().split(","):
        name, *parameters = (text.strip() for text in part.split(";"))
        ranks[name] = next((_quality(text[2:]) for text in parameters if text.startswith("q=")), 1.0)
    rank_of_data = next((ranks[name] for name in _DATA if name in ranks), 0.0)
    return ranks.get(_PAGE, 0.0) > rank_of_data


def _quality(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0
