"""The files beside a trained draft: a model card for people, and a log for programs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from baton.train.evaluate import Acceptance, Evaluation
from baton.train.settings import TrainingSettings
from baton.train.tree_evaluation import TreeAcceptance

CARD_NAME = "README.md"
LOG_NAME = "training_log.json"


@dataclass(frozen=True, slots=True)
class CardFacts:
    """Facts for the card that only the caller knows.

    Attributes:
        target_name: name of the target, a hub id for example.
        license: an SPDX identifier.
        data: one or more sentences on the origin of the answers.
        command: the command line that repeats the training.
    """

    target_name: str
    license: str
    data: str
    command: str


@dataclass(frozen=True, slots=True)
class Description:
    """The description of a draft and its kind.

    Attributes:
        title: ``"EAGLE-3.1 draft head"`` for example.
        tag: the tag for model hubs.
        text: one or more sentences.
        rows: names and values of this draft's properties.
        settings: effective values of the settings that the target or the initial draft determines.
    """

    title: str
    tag: str
    text: str
    rows: tuple[tuple[str, str], ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """Facts measured during training.

    Attributes:
        num_samples: number of answers in the training data.
        num_answer_tokens: number of tokens in these answers.
        num_held_out: number of held-out answers.
        num_rows: answer tokens seen, counted again in each epoch.
    """

    settings: TrainingSettings
    target_fingerprint: str
    num_samples: int
    num_answer_tokens: int
    num_held_out: int
    num_steps: int
    num_rows: int
    elapsed_s: float
    num_parameters: int


def write_card(
    folder: Path, facts: CardFacts, description: Description, numbers: TrainingFacts, evaluation: Evaluation
) -> None:
    """Writes ``README.md`` with the front matter that model hubs read."""
    rows = [
        ("target", f"{facts.target_name} (fingerprint `{numbers.target_fingerprint}`)"),
        ("parameters", f"{numbers.num_parameters:,}"),
        *description.rows,
        ("trained on", f"{numbers.num_samples:,} answers, {numbers.num_answer_tokens:,} tokens"),
        ("held out", f"{numbers.num_held_out:,} answers"),
        ("steps", f"{numbers.num_steps:,} ({numbers.num_rows:,} tokens seen) in {numbers.elapsed_s / 60:.0f} min"),
        ("seed", str(numbers.settings.seed)),
    ]
    text = f"""---
license: {facts.license}
base_model: {facts.target_name}
tags: [{description.tag}, speculative-decoding]
---

# {description.title} for {facts.target_name}

Drafts tokens for {facts.target_name} in speculative decoding. It does not change the target's output.
{description.text}

| | |
|---|---|
{_table(rows)}

## Data

{facts.data}

## Acceptance

Measured on held-out answers: after every answer token, a chain is drafted greedily and compared with the target's next
tokens. The mean accepted length includes the target's own token.

{_acceptance("temperature 0", evaluation.greedy, evaluation.greedy_tree)}

{_acceptance("sampled answers", evaluation.sampled, evaluation.sampled_tree)}

## Reproduction

```
{facts.command}
```

Settings: `{json.dumps(_shown(numbers.settings, description))}`
"""
    (folder / CARD_NAME).write_text(text, encoding="utf-8")


def write_log(
    path: Path,
    settings: TrainingSettings,
    description: Description,
    log: Sequence[dict[str, Any]],
    evaluation: Evaluation | None,
) -> None:
    """Writes the log of reports and the evaluation (null before it) as JSON."""
    acceptance = None
    if evaluation is not None:
        acceptance = {
            "greedy": _numbers(evaluation.greedy, evaluation.greedy_tree),
            "sampled": _numbers(evaluation.sampled, evaluation.sampled_tree),
        }
    content = {"settings": _shown(settings, description), "acceptance": acceptance, "log": list(log)}
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _table(rows: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in rows)


def _acceptance(title: str, found: Acceptance, tree: TreeAcceptance | None) -> str:
    if not found.reached:
        return f"**{title}**: there were no such held-out answers."
    positions = range(1, len(found.reached) + 1)
    lines = [
        f"**{title}**: mean accepted length {found.mean_accepted_length:.2f} at {len(found.reached)} draft tokens, "
        f"from {found.reached[0]:,} positions",
        "",
        "| draft position | " + " | ".join(str(position) for position in positions) + " |",
        "|---" * (len(found.reached) + 1) + "|",
        "| accepted with all earlier ones | " + " | ".join(f"{rate:.3f}" for rate in found.unconditional) + " |",
        "| accepted if all earlier ones are | " + " | ".join(f"{rate:.3f}" for rate in found.conditional) + " |",
    ]
    if tree is not None:
        lines += ["", f"As a tree of {tree.num_nodes} tokens: mean accepted length {tree.mean_accepted_length:.2f}"]
    return "\n".join(lines)


def _numbers(found: Acceptance, tree: TreeAcceptance | None) -> dict[str, Any]:
    numbers = {
        "reached": found.reached,
        "accepted": found.accepted,
        "unconditional": found.unconditional,
        "conditional": found.conditional,
        "mean_accepted_length": found.mean_accepted_length,
    }
    return numbers if tree is None else numbers | {"tree": asdict(tree)}


def _shown(settings: TrainingSettings, description: Description) -> dict[str, Any]:
    """The effective settings, without folders of the training machine."""
    shown = {**asdict(settings), **description.settings}
    if shown.get("start_from") is not None:
        shown["start_from"] = Path(shown["start_from"]).name
    return shown
