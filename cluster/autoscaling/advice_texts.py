"""Advice in sentences."""

from __future__ import annotations

from cluster.autoscaling import tuning
from cluster.autoscaling.advice import Advice, DraftFigures, Option
from cluster.autoscaling.disaggregation import rate_text


def advice_texts(advice: Advice) -> list[str]:
    """Sentences on what to change and what to keep."""
    if advice.missing or advice.now is None or advice.best is None:
        return [f"No advice: {advice.missing or 'there are no measurements yet.'}"]
    return [
        _ratio(advice.now, advice.best),
        _local(advice.local_share, advice.best.local_share),
        advice.disaggregation.text,
        *(_drafts(figures) for figures in advice.drafts),
    ]


def _ratio(now: Option, best: Option) -> str:
    most = f"can serve {rate_text(now.capacity)}; the first limit is {now.limit}."
    if (now.prefill, now.decode) == (best.prefill, best.decode):
        return f"Ratio: keep {now.prefill} prefill to {now.decode} decode workers; they {most}"
    return (
        f"Ratio: {best.prefill} prefill to {best.decode} decode workers could serve {rate_text(best.capacity)}; "
        f"the current {now.prefill} to {now.decode} {most}"
    )


def _local(present: float, best: float) -> str:
    if present == best:
        return f"Local prefill: keep {_percent(present)} of the uncached prompt tokens on decode workers."
    if not present:
        return (
            f"Local prefill: {_percent(best)} of the uncached prompt tokens on decode workers, the shortest prompts "
            "first, would serve more; now they compute none (routing.local_prefill)."
        )
    return (
        f"Local prefill: at the most load, {_percent(best)} of the uncached prompt tokens belong on decode workers; at "
        f"the present load the router puts {_percent(present)} there."
    )


def _drafts(figures: DraftFigures) -> str:
    load = "at the present load" if figures.is_present else "at the highest load that meets the targets"
    sequences = f"{figures.batch} sequence{'' if figures.batch == 1 else 's'}"
    at = f"Speculation {load} ({sequences} per step of a worker): "
    if figures.tokens_per_round < tuning.TOKENS_PER_ROUND_WITH_DRAFTS:
        return f"{at}almost no tokens come from drafts, so there is no advice."
    numbers = (
        f"{figures.tokens_per_round:.2f} tokens per round; a token takes {figures.tpot_ms:.3g} ms, "
        f"{figures.plain_tpot_ms:.3g} ms without drafts"
    )
    if figures.gain >= 1.0:
        return f"{at}{numbers}; it pays off."
    return (
        f"{at}{numbers}; all methods together, as requests used them, cost more than they save. The table of workers "
        "shows which of them pay off; `auto` uses no others."
    )


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"
