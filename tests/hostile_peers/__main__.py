"""Sends many hostile calls to a prefill and a decode worker, and prints how they were answered.

``python -m tests.hostile_peers [--calls 10000] [--seed 0]`` (``make fuzz``). Ends at the first answer that is neither a
success nor a typed refusal, at an error in the log, a leak, or a right request that gets wrong tokens.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.hostile_peers.session import hostile_session

_REPORT_EVERY = 1000


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile_peers", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="least number of calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default: %(default)s)")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, hostile_session(Path(folder)) as session:
        while session.num_calls < arguments.calls:
            session.run(min(_REPORT_EVERY, arguments.calls - session.num_calls), arguments.seed + session.num_calls)
            _say(f"{session.num_calls} calls, {session.num_messages} messages: {session.memory_mb:.0f} MB of memory")
        for (method, answer), count in sorted(session.answers.items()):
            _say(f"{method:32} {answer:28} {count:6}")
    _say(f"No problem found in {time.monotonic() - began_s:.0f} s.")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
