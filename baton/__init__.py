"""LLM serving in which prefill and decode run on separate pools: the library that every process shares."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from baton.core.request import SamplingParams as SamplingParams
    from baton.llm import LLM as LLM
    from baton.llm import RequestOutput as RequestOutput

__all__ = ["LLM", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Imports on first use, since the control plane needs this package without torch."""
    if name == "SamplingParams":
        from baton.core.request import SamplingParams

        return SamplingParams
    if name in __all__:
        from baton import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
