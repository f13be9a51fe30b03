"""The text on which a loss of quality is measured: the options that choose it, and its tokens."""

from __future__ import annotations

import argparse
from pathlib import Path

from baton.core.errors import ConfigError
from baton.engine.models.model_source import ModelSource
from baton.engine.models.tokenizer import Tokenizer
from baton.process.cores import usable_cores

_DEFAULT_TEXT = Path(__file__).parent / "perplexity_text.txt"


def add_options(parser: argparse.ArgumentParser) -> None:
    """``--text``, ``--window`` and ``--tokens``, and what every such measurement has beside."""
    parser.add_argument("--model", default="default")
    parser.add_argument("--text", type=Path, nargs="+", default=[_DEFAULT_TEXT], help="files, read one after the other")
    parser.add_argument("--window", type=int, default=512, help="tokens")
    parser.add_argument("--tokens", type=int, default=16384, help="most that are read")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--json", type=Path, help="also write all sums here")


def read_tokens(arguments: argparse.Namespace, source: ModelSource, least: int) -> list[int]:
    """The text's tokens, by the model's tokenizer.

    Args:
        arguments: of :func:`add_options`.
        least: tokens of which a window must have at least so many.

    Raises:
        ConfigError: the text or the window has fewer.
    """
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in arguments.text)
    token_ids = list(Tokenizer.load(source.path).encode(text)[: arguments.tokens])
    if min(len(token_ids), arguments.window) < least:
        raise ConfigError(f"There is nothing to predict: --text and --window need {least} tokens at least.")
    return token_ids
