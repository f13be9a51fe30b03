"""Training prompts of many kinds, made from the templates in ``prompt_templates.yaml``."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

import yaml

from baton.train.prompts import Turns

_SLOT = re.compile(r"\{(\w+)\}")
_NUMBER = "number"
_NUMBERS = range(2, 400)


@dataclass(frozen=True, slots=True)
class PromptTemplates:
    """Templates of prompts.

    Attributes:
        kinds: by kind, the turns of each template.
        values: by name, what may stand in its place; values may contain names too.
    """

    kinds: dict[str, tuple[Turns, ...]]
    values: dict[str, tuple[str, ...]]

    @classmethod
    def load(cls) -> PromptTemplates:
        """The templates that come with baton."""
        text = (resources.files("baton.train") / "prompt_templates.yaml").read_text(encoding="utf-8")
        found: dict[str, Any] = yaml.safe_load(text)
        kinds = {
            kind: tuple((template,) if isinstance(template, str) else tuple(template) for template in templates)
            for kind, templates in found["kinds"].items()
        }
        return cls(kinds, {name: tuple(values) for name, values in found["values"].items()})

    def prompts(self, count: int, seed: int) -> list[Turns]:
        """``count`` prompts, of each kind in turn. The same seed gives the same prompts."""
        choose = random.Random(f"prompts:{seed}")
        kinds = list(self.kinds.values())
        return [
            tuple(self._filled(turn, choose) for turn in choose.choice(kinds[index % len(kinds)]))
            for index in range(count)
        ]

    def _filled(self, text: str, choose: random.Random) -> str:
        def value(slot: re.Match[str]) -> str:
            if slot[1] == _NUMBER:
                return str(choose.choice(_NUMBERS))
            return self._filled(choose.choice(self.values[slot[1]]), choose)

        return _SLOT.sub(value, text)
