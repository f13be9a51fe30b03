"""Checks the nodes of a Ray cluster before workers start: versions, reachability, and on request everything else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from baton.core.errors import BatonError, ConfigError
from baton.core.roles import DECODE, POOLS, PREFILL
from baton.engine.models.default_model import is_default_model
from baton.engine.models.model_source import is_hub_id
from baton.process.worker_environment import carried_variables
from cluster.config.config import BatonConfig
from cluster.controller.placement import Node, fits_somewhere, live_nodes, pool_resources
from cluster.nodes.node_facts import NodeFacts, gather_facts
from cluster.nodes.node_probe import NodeProbe, Target
from cluster.nodes.node_problems import (
    Problem,
    clock_problems,
    gpu_problems,
    machine_problems,
    model_problems,
    version_problems,
)

_ANSWER_S = 90.0
"""A busy node needs long to start a process."""
_CLOCK_READINGS = 5


@dataclass(slots=True)
class CheckedNode:
    """A node on which a probe runs.

    Attributes:
        pools: whose workers fit on the node.
        target: where its probe listens.
        offset_s: by how much its clock is ahead of this machine's.
    """

    name: str
    probe: Any
    pools: tuple[str, ...]
    facts: NodeFacts | None = None
    target: Target | None = None
    offset_s: float = 0.0


@dataclass(slots=True)
class NodeReport:
    """The outcome.

    Attributes:
        bytes_per_s: of one connection from a prefill node to a decode node, by their names.
    """

    nodes: list[CheckedNode]
    problems: list[Problem] = field(default_factory=list)
    bytes_per_s: dict[tuple[str, str], float] = field(default_factory=dict)


def refuse_unfit_nodes(config: BatonConfig, report: Callable[[str], None]) -> None:
    """The checks of ``baton up``, on a cluster of several machines: versions and reachability.

    Raises:
        ConfigError: workers could not work together; the message has every problem and its remedy.
    """
    if config.ray.is_local:
        return
    report("checking the nodes' versions and connections")
    problems = [problem for problem in check_nodes(config, thorough=False).problems if problem.is_fatal]
    if problems:
        texts = "\n".join(problem.text for problem in problems)
        raise ConfigError(f"{texts}\n`baton check --nodes` shows the nodes.")


def check_nodes(config: BatonConfig, *, thorough: bool) -> NodeReport:
    """Checks all nodes. This process must be connected to Ray, and is taken for the head.

    Args:
        thorough: also measures clocks and bandwidths, and compares drivers, limits and devices.
    """
    nodes = list(_start_probes(config))
    report = NodeReport(nodes)
    try:
        report.problems += _fill_in(nodes)
        known = {node.name: node.facts for node in nodes if node.facts is not None}
        report.problems += version_problems(gather_facts(config.model), known)
        report.problems += _connection_problems(config, nodes)
        if thorough:
            _read_clocks(nodes)
            report.problems += _thorough_problems(config, nodes)
            _measure(report)
    finally:
        for node in nodes:
            ray.kill(node.probe, no_restart=True)
    return report


def _start_probes(config: BatonConfig) -> Iterator[CheckedNode]:
    """A probe on every live node on which workers may run."""
    actor_class: Any = ray.remote(NodeProbe)
    entries = [entry for entry in ray.nodes() if entry["Alive"]]
    for entry, node in zip(entries, live_nodes(entries), strict=True):
        pools = tuple(pool for pool in POOLS if _runs(config, pool, node))
        there = NodeAffinitySchedulingStrategy(entry["NodeID"], soft=False)
        options = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": there}
        if pools:
            probe = actor_class.options(**options).remote(config.to_dict(), carried_variables())
            yield CheckedNode(node.name, probe, pools)


def _runs(config: BatonConfig, pool: str, node: Node) -> bool:
    if config.simulation.profile is not None:  # simulated workers request nothing
        return True
    return fits_somewhere(pool_resources(config, pool), [node])


def _fill_in(nodes: list[CheckedNode]) -> Iterator[Problem]:
    """Asks all nodes at once for their facts and listeners."""
    calls = [(node, node.probe.facts.remote(), node.probe.listen.remote()) for node in nodes]
    give_up_at = time.monotonic() + _ANSWER_S
    for node, facts, target in calls:
        try:
            node.facts = NodeFacts.from_dict(_result(facts, give_up_at - time.monotonic()))
            node.target = _result(target, give_up_at - time.monotonic())
        except BatonError as error:
            yield Problem(True, f"{node.name}: {error.message}")
        except GetTimeoutError:
            yield Problem(
                True, f"{node.name}: no process started there within {_ANSWER_S:g} s. Look at its Ray's logs."
            )
        except RayError as error:
            reason = str(error).strip().splitlines()[-1]
            yield Problem(True, f"{node.name}: baton does not run there ({reason}). Install it as on the head.")


def _result(reference: Any, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=max(0.1, timeout_s))
    except RayTaskError as error:
        raise error.cause if isinstance(error.cause, BatonError) else error from None


def _connection_problems(config: BatonConfig, nodes: list[CheckedNode]) -> Iterator[Problem]:
    """The router, which is here, connects to all workers, and prefill workers to decode workers."""
    here = NodeProbe(config.to_dict(), {})
    listening = [node for node in nodes if node.target is not None]
    targets = [node.target for node in listening if node.target is not None]
    yield from _unreachable("the router's machine", listening, here.reach(targets), config)
    receivers = [node for node in listening if DECODE in node.pools]
    to_receivers = [node.target for node in receivers]
    senders = [node for node in listening if PREFILL in node.pools]
    for sender, reached in [(sender, sender.probe.reach.remote(to_receivers)) for sender in senders]:
        try:
            yield from _unreachable(sender.name, receivers, _result(reached, _ANSWER_S), config)
        except RayError as error:
            yield Problem(True, f"{sender.name}: the check ended with {type(error).__name__}. Look at its Ray's logs.")


def _unreachable(source: str, nodes: list[CheckedNode], reasons: list[str], config: BatonConfig) -> Iterator[Problem]:
    for node, reason in zip(nodes, reasons, strict=True):
        if reason and node.target is not None:
            host, port = node.target
            opened = f"the ports {config.network.ports}" if config.network.ports else "its ports, or set network.ports"
            yield Problem(
                True,
                f"{source} cannot reach {node.name} at {host} port {port}: {reason}. Open {opened} in the firewall of "
                f"{node.name}, or name the right network in network.address.",
            )


def _read_clocks(nodes: list[CheckedNode]) -> None:
    for node in nodes:
        if node.facts is None:
            continue
        readings = []
        for _ in range(_CLOCK_READINGS):
            before_s = time.time()
            there_s = _result(node.probe.now_s.remote(), _ANSWER_S)
            after_s = time.time()
            readings.append((after_s - before_s, there_s - (before_s + after_s) / 2))
        node.offset_s = min(readings)[1]  # of the fastest answer


def _thorough_problems(config: BatonConfig, nodes: list[CheckedNode]) -> Iterator[Problem]:
    known = {node.name: node.facts for node in nodes if node.facts is not None}
    with_gpus = {
        node.name: node.facts
        for node in nodes
        if node.facts is not None and any(config.pool(pool).resources.gpus for pool in node.pools)
    }
    yield from gpu_problems(with_gpus)
    yield from machine_problems(known, uses_rdma=config.kv_transfer.transport == "nixl")
    yield from clock_problems({node.name: node.offset_s for node in nodes})
    is_folder = not is_default_model(config.model) and not is_hub_id(config.model)
    yield from model_problems(config.model, known, is_folder=is_folder)


def _measure(report: NodeReport) -> None:
    """Measures one connection at a time, so that each node takes part at least once."""
    senders = [node for node in report.nodes if PREFILL in node.pools and node.target is not None]
    receivers = [node for node in report.nodes if DECODE in node.pools and node.target is not None]
    for index in range(max(len(senders), len(receivers)) if senders and receivers else 0):
        sender, receiver = senders[index % len(senders)], receivers[index % len(receivers)]
        if sender is receiver and len(receivers) > 1:
            receiver = receivers[(index + 1) % len(receivers)]
        if sender is not receiver:
            rate = _result(sender.probe.send.remote(receiver.target), _ANSWER_S)
            report.bytes_per_s[sender.name, receiver.name] = rate
