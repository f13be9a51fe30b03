"""``baton scale``: changes the number of workers of each pool while the cluster serves."""

from __future__ import annotations

import asyncio
import difflib
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from baton.client.router_client import RouterClient
from baton.core.errors import BatonError, ConfigError, DeadlineError
from baton.core.roles import POOLS
from cluster.autoscaling.autoscaler_config import how_to_sleep

_POLL_S = 0.5
_AUTO = "auto"


def parse_targets(assignments: Sequence[str]) -> dict[str, int | str]:
    """Parses ``["prefill=2", "decode=auto"]`` into ``{"prefill": 2, "decode": "auto"}``.

    Raises:
        ConfigError: an assignment is malformed, a pool is unknown or named twice, or a number is below 1.
    """
    targets: dict[str, int | str] = {}
    for assignment in assignments:
        pool, separator, number = assignment.partition("=")
        if not separator:
            raise ConfigError(f"{assignment!r}: expected POOL=NUMBER, such as prefill=2.")
        if pool not in POOLS:
            close = difflib.get_close_matches(pool, POOLS, n=1)
            hint = f" Did you mean {close[0]}?" if close else ""
            raise ConfigError(f"{assignment!r}: there is no pool {pool!r}.{hint} Known pools: {', '.join(POOLS)}.")
        if pool in targets:
            raise ConfigError(f"The pool {pool} is named twice.")
        if number == _AUTO:
            targets[pool] = _AUTO
            continue
        if not (number.isascii() and number.isdigit()) or int(number) < 1:
            hint = f" {how_to_sleep(pool)}" if number == "0" else ""
            raise ConfigError(f"{assignment!r}: expected a number of workers of at least 1, or auto.{hint}")
        targets[pool] = int(number)
    return targets


async def scale(
    client: RouterClient,
    targets: Mapping[str, int | str],
    wait_s: float | None,
    report: Callable[[str], None],
    note: Callable[[str], None],
) -> dict[str, int]:
    """Sets the targets and waits until the wanted workers are ready and the others have left.

    Args:
        wait_s: how long to wait; ``None`` means not at all.
        report: called with lines of progress, of which only the last matters.
        note: called with lines that the user should keep.

    Returns:
        Every pool's target.

    Raises:
        DeadlineError: the pools did not reach their targets within ``wait_s`` seconds; the targets stay set.
    """
    answer = await client.scale(targets)
    for name, pool in answer["pools"].items():
        if name in targets and pool.get("pinned"):
            note(f"{name} stays at that size until `baton scale {name}=auto` returns it to the autoscaler")
    if _AUTO in targets.values():
        await _note_next_steps([name for name, target in targets.items() if target == _AUTO], client, note)
    numbers = {name: target for name, target in targets.items() if isinstance(target, int)}
    if wait_s is not None and numbers:
        await _wait(client, numbers, wait_s, report)
    return {name: int(pool["target"]) for name, pool in answer["pools"].items()}


async def _note_next_steps(pools: Sequence[str], client: RouterClient, note: Callable[[str], None]) -> None:
    """Notes the autoscaler's next step for pools that are handed back to it, which it may shrink at once."""
    try:
        plans: Mapping[str, Any] = (await client.plan())["pools"]
    except BatonError as error:
        plans = {}
        note(f"the autoscaler's plan cannot be shown: {error.message}")
    for name in pools:
        texts = plans[name]["texts"] if name in plans else ()
        next_step = f"; its next step: {' '.join(texts)}" if texts else "."
        note(f"{name} is returned to the autoscaler{next_step}")
    note("`baton plan` shows what the autoscaler would do next, and why")


async def _wait(client: RouterClient, targets: Mapping[str, int], wait_s: float, report: Callable[[str], None]) -> None:
    deadline_s = time.monotonic() + wait_s
    pools = (await client.status())["pools"]
    # Workers that died before this change; their reasons are unrelated to it.
    dead = {worker["id"] for name in targets for worker in pools[name]["workers"] if _is_dead(worker)}
    reported = ""
    reported_reasons: set[str] = set()
    while True:
        states = {name: _states(pools[name]) for name in targets}
        if all(states[name] == {"ready": number} for name, number in targets.items()):
            return
        reasons = _reasons([pools[name] for name in targets], dead)
        now = "; ".join(f"{name}: {_in_words(counts)}" for name, counts in states.items())
        if time.monotonic() >= deadline_s:
            why = "".join(f"\n{worker}: {reason}" for reason, worker in reasons.items())
            raise DeadlineError(f"The pools did not reach their targets within {wait_s:g} s. Now: {now}.{why}")
        if now != reported:
            reported = now
            report(now)
        for reason, worker in reasons.items():
            if reason not in reported_reasons:
                reported_reasons.add(reason)
                report(f"{worker}: {reason}")
        await asyncio.sleep(_POLL_S)
        pools = (await client.status())["pools"]


def _reasons(pools: Sequence[Mapping[str, Any]], dead: Collection[str]) -> dict[str, str]:
    """The reasons why workers are not ready or died, each with one such worker. Excludes the ``dead``."""
    workers = [worker for pool in pools for worker in pool["workers"] if worker["id"] not in dead]
    return {worker["reason"]: worker["id"] for worker in reversed(workers) if worker["reason"]}


def _states(pool: Mapping[str, Any]) -> dict[str, int]:
    """The number of workers in each state, without dead ones."""
    counts: dict[str, int] = {}
    for worker in pool["workers"]:
        if not _is_dead(worker):
            counts[worker["state"]] = counts.get(worker["state"], 0) + 1
    return counts


def _is_dead(worker: Mapping[str, Any]) -> bool:
    return bool(worker["state"] == "dead")


def _in_words(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {state}" for state, number in sorted(counts.items())) or "none"
