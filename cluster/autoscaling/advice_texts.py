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
        _local(advice.now, advice.best),
        advice.disaggregation.text,
        *(_drafts(figures) for figures in advice.drafts),
    ]


def _ratio(now: Option, best: Option) -> str:
    if (now.prefill, now.decode) == (best.prefill, best.decode):
        kept = f"{now.prefill} prefill to {now.decode} decode workers"
        return f"Ratio: keep {kept}; they can serve {rate_text(now.capacity)}."
    return (
        f"Ratio: {best.prefill} prefill to {best.decode} decode workers could serve {rate_text(best.capacity)}; "
        f"the current {now.prefill} to {now.decode} can serve {rate_text(now.capacity)}."
    )


def _local(now: Option, best: Option) -> str:
    if now.local_share == best.local_share:
        return f"Local prefill: keep {_percent(now.local_share)} of the uncached prompt tokens on decode workers."
    return (
        f"Local prefill: compute {_percent(best.local_share)} of the uncached prompt tokens on decode workers, the "
        f"shortest prompts first; the current share is {_percent(now.local_share)}."
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
        f"{at}{numbers}; it costs more than it saves. `auto` drafts nothing in this case; other methods should draft "
        "less."
    )


def _percent(share: float) -> str:
    return f"{share * 100:.3g} %"
