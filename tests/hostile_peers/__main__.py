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

_WARM_UP = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile_peers", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="least number of calls (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="first seed (default: %(default)s)")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    warm_up = int(arguments.calls * _WARM_UP)
    with tempfile.TemporaryDirectory() as folder, hostile_session(Path(folder)) as session:
        session.run(warm_up, arguments.seed)
        warm_mb = session.memory_mb
        session.run(arguments.calls - warm_up, arguments.seed + 1_000_000)
        for (method, answer), count in sorted(session.answers.items()):
            sys.stdout.write(f"{method:32} {answer:28} {count:6}\n")
        sys.stdout.write(
            f"{session.num_calls} calls with {session.num_messages} messages in {time.monotonic() - began_s:.0f} s: "
            f"every answer typed, every right request answered, nothing left.\n"
            f"Memory {warm_mb:.0f} MB after {warm_up} calls, {session.memory_mb:.0f} MB at the end.\n"
        )


if __name__ == "__main__":
    main()
