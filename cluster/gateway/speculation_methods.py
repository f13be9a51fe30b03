"""The speculation methods for people who choose one: what each costs and is good for, and whether it can run here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.core.roles import DRAFT_METHODS
from cluster.requests.generation import ModelCard

Json = dict[str, Any]

_CHAIN = "chains, up to speculation.max_draft_tokens"
_TREE = "trees, up to speculation.max_tree_tokens"
_CODE = "Write a Python function that counts the words of a text, and one that counts its lines."
_PATTERN = "Write HTML for a list with ten items: Item 1, Item 2 and so on."


@dataclass(frozen=True, slots=True)
class SpeculationMethodCard:
    """A method in a few words.

    Attributes:
        method: its name in requests and configurations.
        title: its name for people.
        idea: where its drafts come from.
        setup: what has to be there before it can run.
        length: shape and length of its drafts.
        use: the text and the load that it is good for.
        paper: authors and title of the paper that introduced it.
        arxiv: the paper's number on arXiv; its first two digits are the year.
        prompt: a question whose answer shows the method.
        draft: value of ``speculation.draft`` that loads the draft of a method that needs one.
    """

    method: str
    title: str
    idea: str
    setup: str
    length: str
    use: str
    paper: str
    arxiv: str
    prompt: str
    draft: str = ""

    def to_dict(self, model: ModelCard) -> Json:
        """Returns a JSON-ready dict, with whether ``model`` is served with what the method needs."""
        return {
            "method": self.method,
            "title": self.title,
            "available": self.method not in DRAFT_METHODS or self.method in model.draft_methods,
            "setting": f"speculation.draft: {self.draft}" if self.draft else None,
            "idea": self.idea,
            "setup": self.setup,
            "length": self.length,
            "use": self.use,
            "year": 2000 + int(self.arxiv[:2]),
            "paper": {"title": self.paper, "url": f"https://arxiv.org/abs/{self.arxiv}"},
            "prompt": self.prompt,
        }


SPECULATION_METHODS = (
    SpeculationMethodCard(
        "ngram",
        "N-grams (prompt lookup)",
        "The last few tokens are looked up in the text so far, and what followed them there is the draft.",
        "nothing",
        _CHAIN,
        "answers that quote their prompt: extraction, edits, code",
        "N. Yang et al.: Inference with Reference",
        "2304.04487",
        _PATTERN,
    ),
    SpeculationMethodCard(
        "suffix",
        "Suffix automaton",
        "As with n-grams, with the longest repetition that the text ends with, however long it is.",
        "nothing",
        _CHAIN,
        "the same; and agents, whose requests repeat each other",
        "G. Oliaro et al.: SuffixDecoding",
        "2411.04975",
        _PATTERN,
    ),
    SpeculationMethodCard(
        "lookahead",
        "Lookahead",
        "The model continues a window of guesses in the same step, and its n-grams become drafts for later steps.",
        "nothing",
        _TREE,
        "one request at a time on a machine with arithmetic to spare",
        "Y. Fu et al.: Break the Sequential Dependency of LLM Inference Using Lookahead Decoding",
        "2402.02057",
        _CODE,
    ),
    SpeculationMethodCard(
        "eagle",
        "EAGLE and EAGLE-2",
        "A decoder layer continues the model's last hidden state together with its tokens.",
        "a head that was trained for this model",
        f"{_CHAIN}; for few requests {_TREE}",
        "chat and code with few requests at a time",
        "Y. Li et al.: EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty",
        "2401.15077",
        "What is the difference between weather and climate?",
        "FOLDER of EAGLE heads",
    ),
    SpeculationMethodCard(
        "eagle3",
        "EAGLE-3",
        "A decoder layer continues early, middle and late hidden states, trained on its own drafts.",
        "a head that was trained for this model; the default model comes with one",
        f"{_CHAIN}; for few requests {_TREE}",
        "chat and code with few requests at a time",
        "Y. Li et al.: EAGLE-3: Scaling up Inference Acceleration via Training-Time Test",
        "2503.01840",
        "What is the difference between weather and climate?",
        "eagle3 (with the default model), or FOLDER of an EAGLE-3 head",
    ),
    SpeculationMethodCard(
        "medusa",
        "Medusa",
        "Several heads each guess one further token from the same hidden state.",
        "heads that were trained for this model; the default model comes with some",
        _TREE,
        "models that have published heads; one pass drafts everything",
        "T. Cai et al.: Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads",
        "2401.10774",
        _CODE,
        "medusa (with the default model), or FOLDER of Medusa heads",
    ),
    SpeculationMethodCard(
        "draft_model",
        "Draft model",
        "A smaller model writes the next tokens.",
        "a smaller model with the same vocabulary, as comes with the default model; its memory and its KV cache",
        _CHAIN,
        "large models that have a small relative",
        "Y. Leviathan et al.: Fast Inference from Transformers via Speculative Decoding",
        "2211.17192",
        "Explain in three sentences how rain forms.",
        "draft_model (with the default model), or FOLDER of a smaller model",
    ),
)
"""In the order in which they are easy to understand, without a network first."""


def describe_methods(model: ModelCard) -> Json:
    """The answer of ``GET /v1/speculation``."""
    return {"object": "list", "data": [card.to_dict(model) for card in SPECULATION_METHODS]}
