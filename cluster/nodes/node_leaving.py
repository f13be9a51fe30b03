"""Takes this machine's Ray node out of its cluster before its pod or machine ends.

``baton node join`` does this by itself when it ends. A pod that KubeRay made runs Ray without it, so its ``preStop``
hook calls ``baton node drain``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import TypeVar

from baton.core.errors import ConfigError, DeadlineError, WorkerLostError
from cluster.nodes.ray_head import RayHead

T = TypeVar("T")

_POLL_S = 0.5
_ANNOUNCEMENT_S = 5.0
"""When all pods of a cluster end at once, the head's hook announces it within this time."""
_HEAD_LOST_S = 10.0
"""A head that has not answered for so long has ended; a shorter silence may be a restart of Ray's control store."""

Report = Callable[[str], None]


def leave_cluster(head: RayHead, addresses: Collection[str], timeout_s: float, report: Report) -> None:
    """Drains the nodes at these addresses and waits until they have left, or until the head has ended.

    Ray places nothing on a draining node, and the controller moves its workers: they get no new requests, and end when
    those in flight have ended. If the whole cluster ends, the workers of all nodes are needed for the requests in
    flight; then the nodes are not drained and stay until the head has ended.

    Args:
        addresses: of the machine; a node at one of them that is the head is left alone.

    Raises:
        ConfigError: the head refuses the token, or has no node at the addresses.
        DeadlineError: a node is still there after ``timeout_s``.
    """
    until_s = time.monotonic() + timeout_s
    nodes = _ask(head.nodes, report)
    if nodes is None:
        return
    if not (leaving := nodes.at(addresses)):
        raise ConfigError(
            f"The Ray cluster at {head.address} has no node at {', '.join(addresses)} beside its head. Name the "
            "address of the node with --address."
        )
    if _cluster_ends(head, min(until_s, time.monotonic() + _ANNOUNCEMENT_S)):
        report("the whole cluster ends; this node stays until its head has ended")
    else:
        left_s = max(0.0, until_s - time.monotonic())
        for node_id in leaving:
            _ask(partial(head.drain, node_id, left_s), report)
        report("draining this node; its workers finish their requests")
    while nodes is not None and leaving & nodes.others.keys():
        if time.monotonic() >= until_s:
            raise DeadlineError(f"This node has not left the cluster after {timeout_s:g} s. Raise --timeout.")
        time.sleep(_POLL_S)
        nodes = _ask(head.nodes, report)


def _cluster_ends(head: RayHead, until_s: float) -> bool:
    """Whether the head announces its end before ``until_s``."""
    while True:
        with suppress(WorkerLostError):
            if head.is_ending():
                return True
        if time.monotonic() >= until_s:
            return False
        time.sleep(_POLL_S)


def _ask(question: Callable[[], T], report: Report) -> T | None:
    """The head's answer; ``None`` if the head has ended. Raises :class:`ConfigError` if it refuses the token."""
    lost_s = time.monotonic() + _HEAD_LOST_S
    while True:
        try:
            return question()
        except WorkerLostError as error:
            if time.monotonic() >= lost_s:
                report(error.message)
                return None
        time.sleep(_POLL_S)
