"""Faults in a running cluster, drawn from a seed: ``make chaos ARGS="--seed 3 --minutes 60"``.

Starts a cluster of the default model with two prefill and two decode workers, each on a host of its own where this
machine can make network namespaces. Clients send greedy and sampled requests, some of which are cancelled, while
workers are killed and stopped, and their links cut, slowed or made lossy. Then requests are cancelled in bursts. All
tokens are compared with those of a single engine. Exits with 1 if anything does not hold, and keeps the logs then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from baton.core.roles import POOLS
from benchmarks.options import at_least
from tests.chaos.clusters import SIZE, Running, on_separate_hosts, on_this_machine, own_processes
from tests.chaos.faults import lose_controller
from tests.chaos.logs import run_folder
from tests.chaos.plan import DEFAULT_GROUPS, GROUPS, draw
from tests.chaos.report import checks, counts, document, faults_table, leaks, verdict_table
from tests.chaos.resources import Holdings
from tests.chaos.run import Findings, connect, run
from tests.chaos.target import Target
from tests.chaos.workload import questions
from tests.namespaces import why_no_firewall, why_no_namespaces

_NUM_PROMPTS = 12
_OF_SEPARATE_HOSTS = ("links", "control")
"""Faults that need hosts of their own, or a Ray cluster that outlives its controller."""
_OF_FIREWALLS = ("links",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of faults and requests; default: the time")
    parser.add_argument("--minutes", type=float, default=60.0, help="how long faults happen")
    parser.add_argument(
        "--faults",
        nargs="+",
        choices=GROUPS,
        default=list(DEFAULT_GROUPS),
        help="which happen; default: all but hosts and control",
    )
    parser.add_argument("--one-host", action="store_true", help="all workers share this machine's network")
    parser.add_argument("--clients", type=at_least(1), default=6, help="clients that send at the same time")
    parser.add_argument("--cancels", type=at_least(0), default=1000, help="requests that are cancelled at the end")
    parser.add_argument("--json", type=Path, default=Path("out/chaos.json"), help="where to write the report")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that all processes and hosts end, too
    console = Console(width=120)
    logging.basicConfig(format="%(asctime)s %(message)s")
    logging.getLogger("tests.chaos").setLevel(logging.INFO)
    console.print(f"seed {options.seed}")
    no_hosts = "--one-host" if options.one_host else why_no_namespaces()
    groups = list(options.faults)
    for needing, lacking in ((_OF_SEPARATE_HOSTS, no_hosts), (_OF_FIREWALLS, no_hosts or why_no_firewall())):
        if lacking and (impossible := [group for group in groups if group in needing]):
            console.print(f"no faults of {' and '.join(impossible)}: {lacking}")
            groups = [group for group in groups if group not in impossible]
    if not groups:
        parser.error("none of the faults is possible here")
    known, findings = questions(_NUM_PROMPTS), Findings()

    async def faults(running: Running) -> None:
        async with connect(running.endpoint) as http:
            target = Target(http, SIZE, running.hosts, running.pids, running.clocks)
            if "control" in groups:
                # From its first search for survivors on, `baton up` keeps a connection to each of them.
                await lose_controller(target)
            await run(
                target,
                known,
                {pool: draw(options.seed, pool, groups) for pool in POOLS},
                findings,
                seed=options.seed,
                seconds=options.minutes * 60,
                num_clients=options.clients,
                num_cancels=options.cancels,
            )

    def has_failed() -> bool:
        return not all(check.holds for check in checks(findings))

    before = Holdings.of(own_processes())
    logs = options.json.with_name(f"{options.json.stem}-logs")
    with run_folder(logs, has_failed, console.print) as folder:
        with (on_this_machine if no_hosts else on_separate_hosts)(folder, console.print) as running:
            try:
                asyncio.run(faults(running))
            except KeyboardInterrupt:
                findings.problems.append("the run was interrupted, so this is not all of it")
        left = Holdings.of(own_processes()).excess(before)
        findings.excess |= {f"{name} after the end": count for name, count in left.items()}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"options": vars(options), **document(findings)}, indent=1, default=str) + "\n")
    console.print(faults_table(findings))
    console.print(", ".join(f"{count} {name}" for name, count in counts(findings).items()))
    lines = [f"{count} more {name} than before" for name, count in leaks(findings).items()]
    for line in findings.problems + [stream.error for stream in findings.streams if stream.error] + lines:
        console.print(line, markup=False)
    console.print(verdict_table(findings))
    if has_failed():
        console.print(f"Repeat it with the same options and --seed {options.seed}. Details are in {options.json}.")
        sys.exit(1)


if __name__ == "__main__":
    main()
