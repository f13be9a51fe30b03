"""The resources that a pool's workers request from Ray, and the message when no node has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.process.worker_environment import is_like_a_worker, worker_variables
from cluster.config.config import BatonConfig
from cluster.config.worker_config import ResourcesConfig
from cluster.nodes.node_labels import POOL_LABEL, selector_of

ACCELERATOR_LABEL = "ray.io/accelerator-type"
_GIB = 2**30
_TOO_FEW_CPUS = "too few CPUs"


def pool_resources(config: BatonConfig, pool: str) -> ResourcesConfig:
    """The resources of a pool's workers, which by default avoid nodes that are reserved for another pool."""
    resources = config.pool(pool).resources
    if config.ray.is_local or POOL_LABEL in resources.labels:
        return resources
    return resources.model_copy(update={"labels": {**resources.labels, POOL_LABEL: selector_of(pool)}})


def actor_options(resources: ResourcesConfig, *, is_local: bool = False) -> dict[str, Any]:
    """Options for ``ray.remote(...).options``.

    Args:
        is_local: Ray runs for this cluster alone, so that actors inherit this process's environment. Without a separate
            runtime environment, they need not wait for Ray's environment agent, which starts seconds later.
    """
    options: dict[str, Any] = {"num_cpus": resources.cpus, "num_gpus": resources.gpus}
    if resources.memory_gib is not None:
        options["memory"] = int(resources.memory_gib * _GIB)
    selector = label_selector(resources)
    if selector:
        options["label_selector"] = selector
    if not (is_local and is_like_a_worker()):
        options["runtime_env"] = {"env_vars": worker_variables()}
    return options


def label_selector(resources: ResourcesConfig) -> dict[str, str]:
    """Node labels that must match."""
    selector = dict(resources.labels)
    if resources.accelerator_type is not None:
        selector[ACCELERATOR_LABEL] = resources.accelerator_type
    return selector


@dataclass(frozen=True, slots=True)
class Node:
    """A live node with its total resources, not the free ones."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]

    def describe(self) -> str:
        label = self.labels.get(ACCELERATOR_LABEL)
        return (
            f"{self.name}: {self.resources.get('CPU', 0):g} CPUs, {self.resources.get('GPU', 0):g} GPUs"
            f"{f' ({label})' if label else ''}, {self.resources.get('memory', 0) / _GIB:.1f} GiB"
        )


def live_nodes(ray_nodes: Sequence[Mapping[str, Any]]) -> list[Node]:
    """The live nodes among those that ``ray.nodes()`` returns."""
    return [
        Node(str(node.get("NodeManagerAddress", "?")), node.get("Resources", {}), node.get("Labels", {}))
        for node in ray_nodes
        if node.get("Alive", node.get("alive", False))
    ]


def describe_request(resources: ResourcesConfig) -> str:
    parts = [f"{resources.cpus:g} CPUs", f"{resources.gpus:g} GPUs"]
    if resources.memory_gib is not None:
        parts.append(f"{resources.memory_gib:g} GiB of memory")
    for key, value in label_selector(resources).items():
        parts.append(f"no node label {key} {value[1:]}" if value.startswith("!") else f"the node label {key}={value}")
    return ", ".join(parts)


def fits_somewhere(resources: ResourcesConfig, nodes: Sequence[Node]) -> bool:
    """Whether some node has the resources, free or not."""
    return any(not _lacks(resources, node) for node in nodes)


def explain_pending(
    pool: str, resources: ResourcesConfig, nodes: Sequence[Node], *, is_local: bool = False, num_free_cpus: float = 0.0
) -> str:
    """Explains, node by node, why a worker of ``pool`` may be waiting for resources, and what to do.

    Args:
        is_local: Ray runs for this cluster alone, with ``ray.num_cpus`` CPUs.
        num_free_cpus: number of free CPUs of a local cluster.
    """
    fits = fits_somewhere(resources, nodes)
    if is_local and fits and _needs_only_cpus(resources) and resources.cpus <= num_free_cpus:
        why = "the machine is busy, or Ray hangs"
        return f"There is room for a {pool} worker, but its process is slow to start: {why}."
    lines = [f"A {pool} worker needs {describe_request(resources)}, and Ray has not started it yet."]
    lacks = [_lacks(resources, node) for node in nodes]
    for node, missing in zip(nodes, lacks, strict=True):
        problem = "; ".join(missing) if missing else "large enough, but in use or slow to start it"
        lines.append(f"  {node.describe()}: {problem}")
    if fits:
        more = "raise ray.num_cpus" if is_local and _needs_only_cpus(resources) else "add nodes"
        lines.append(f"If the start is not merely slow, free resources, {more}, or lower {pool}.workers.")
    else:
        only_cpus = is_local and [_TOO_FEW_CPUS] in lacks
        more = "raise ray.num_cpus" if only_cpus else "add nodes that have these resources"
        lines.append(f"No node is large enough: change {pool}.resources, or {more}.")
    if not is_local:
        lines.append("Where Ray's autoscaler adds nodes, it has seen this; the worker starts once one has come.")
    return "\n".join(lines)


def _needs_only_cpus(resources: ResourcesConfig) -> bool:
    return not resources.gpus and resources.memory_gib is None and not label_selector(resources)


def _lacks(resources: ResourcesConfig, node: Node) -> list[str]:
    wanted = {"CPU": resources.cpus, "GPU": resources.gpus, "memory": (resources.memory_gib or 0) * _GIB}
    texts = {"CPU": _TOO_FEW_CPUS, "GPU": "too few GPUs", "memory": "too little memory"}
    lacks = [texts[name] for name, amount in wanted.items() if amount > node.resources.get(name, 0)]
    for key, value in label_selector(resources).items():
        found = node.labels.get(key)
        if not _matches(value, found):
            lacks.append(f"label {key} is {found}" if found else f"no label {key}")
    return lacks


def _matches(selector: str, found: str | None) -> bool:
    """Evaluates Ray's label operators: ``value``, ``!value``, ``in(a, b)`` and ``!in(a, b)``."""
    if selector.startswith("!"):
        return not _matches(selector[1:], found)
    if selector.startswith("in(") and selector.endswith(")"):
        return found in [value.strip() for value in selector[3:-1].split(",")]
    return found == selector
