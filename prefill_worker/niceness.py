"""How much prompts yield to whoever decodes on the same cores."""

from __future__ import annotations

from typing import Literal

_WITH_MATRIX_UNIT = 10


def pick_niceness(niceness: int | Literal["auto"], *, on_cpu: bool, has_tiles: bool) -> int:
    """What to call nice(1) with.

    Who yields by 10 gets a tenth of a core that others want, too. A matrix unit computes prompts in a small part of the
    time that their answers take, so a tenth and what decoding leaves are enough. Elsewhere prompts are most of the
    work: yielding, they would wait for seconds, and decoding would have too few sequences at a time.
    """
    if not on_cpu:
        return 0
    if niceness == "auto":
        return _WITH_MATRIX_UNIT if has_tiles else 0
    return niceness
