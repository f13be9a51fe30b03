"""Reasoning before the answer, between two marks."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.gateway.formats.base import Reasoning, Steps, TokenRefs
from cluster.gateway.formats.grammar import up_to, up_to_rules
from cluster.gateway.formats.source import Source


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its reasoning.

    Attributes:
        name: its name in the configuration.
    """

    name: str
    open: str
    close: str

    @property
    def markers(self) -> tuple[str, ...]:
        return self.open, self.close

    def begins_in(self, prompt: str) -> bool:
        """Whether the prompt ends with the opening mark, as some chat templates write it."""
        return prompt.rstrip().endswith(self.open)

    def parse(self, source: Source, is_open: bool) -> Steps:
        """Reads the reasoning, if there is any. White space around it is dropped."""
        if not is_open:
            source.mark()
            yield from source.skip_space()
            if not (yield from source.skip(self.open)):
                source.rewind()
                return
            source.since_mark()
        source.in_reasoning = True
        yield from source.skip_space()
        yield from source.until((self.close,), Reasoning)
        yield from source.skip_space()
        yield from source.skip(self.close)
        source.in_reasoning = False
        yield from source.skip_space()

    def grammar(self, token: TokenRefs, is_open: bool) -> str:
        """The rule ``reasoning``, which may be empty unless the reasoning has begun in the prompt."""
        text = f"{up_to('think', token, self.close)} SPACE"
        rule = text if is_open else f"({token(self.open)} {text})?"
        return f"reasoning: {rule}\nSPACE: /[ \\n]{{0,2}}/\n" + up_to_rules("think", self.close)
