"""Bounds on what one HTTP request may ask for, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

MEBIBYTE = 1024 * 1024


@dataclass(frozen=True, slots=True)
class GatewayLimits:
    """Attributes:
    max_body_bytes: longer HTTP bodies are refused with 413.
    max_choices: highest ``n``.
    max_sequences: highest number of prompts times ``n``.
    max_stop_strings: highest number of ``stop`` entries.
    max_stop_chars: longest ``stop`` entry, in characters.
    inline_text_chars: longer texts are tokenized in a thread, off the event loop.
    request_timeout_s: a client that has not read its stream by then is cut off.
    """

    max_body_bytes: int = 8 * MEBIBYTE
    max_choices: int = 128
    max_sequences: int = 1024
    max_stop_strings: int = 16
    max_stop_chars: int = 1024
    inline_text_chars: int = 4096
    request_timeout_s: float = 600.0
