"""The protocol between the benchmark and an engine in its own process: one line of JSON each way.

An engine may run under another Python than baton's, so only the standard library is imported here.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[list[int]], int], list[int]]
"""Answers all prompts greedily with exactly this many tokens; returns the number of tokens of each answer."""


def serve(load: Callable[[], Generate]) -> None:
    """Answers jobs from standard input until it ends. The output of libraries goes to standard error."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def reply(**values: object) -> None:
        replies.write(json.dumps(values) + "\n")
        replies.flush()

    generate = load()
    reply(ready=True)
    for line in sys.stdin:
        job = json.loads(line)
        started_s = time.perf_counter()
        num_tokens = generate(job["prompts"], job["max_tokens"])
        reply(seconds=time.perf_counter() - started_s, num_tokens=num_tokens)
