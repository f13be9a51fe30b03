"""Compares the machines of a cluster with what the cluster needs. Pure functions; the facts come from the nodes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cluster.nodes.node_facts import NodeFacts

_OLDEST_DRIVERS = {11: (450, 80), 12: (525, 60), 13: (580, 65)}
"""The oldest driver for each major version of CUDA, by its minor version compatibility (CUDA's release notes)."""
_LEAST_SHM_BYTES = 256 * 2**20
_LEAST_FILES = 4096
_LARGEST_OFFSET_S = 1.0


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that a user should mend.

    Attributes:
        is_fatal: whether workers cannot work like this.
        text: what is wrong, what is expected, and what to do.
    """

    is_fatal: bool
    text: str


def version_problems(head: NodeFacts, nodes: Mapping[str, NodeFacts]) -> Iterator[Problem]:
    """Versions that differ from the head's, for nodes by their names."""
    for name, node in nodes.items():
        for program, own, wanted in (
            ("Python", node.python, head.python),
            ("Ray", node.ray, head.ray),
            ("baton", node.baton, head.baton),
            ("torch", node.torch, head.torch),
        ):
            if own != wanted:
                yield Problem(
                    program != "torch",
                    f"{name}: {program} {own or 'is missing'}{' is installed' if own else ''}, but "
                    f"{wanted or 'none'} on the head. Install the same version everywhere, with constraints.txt.",
                )


def gpu_problems(nodes: Mapping[str, NodeFacts]) -> Iterator[Problem]:
    """GPUs that torch cannot use, on nodes that are to run workers on GPUs."""
    for name, node in nodes.items():
        if not node.driver:
            yield Problem(True, f"{name}: no NVIDIA driver answers (nvidia-smi). Install it, or pass the GPUs through.")
        elif not node.cuda:
            yield Problem(True, f"{name}: torch {node.torch} is built without CUDA. Install a build for CUDA.")
        elif _is_too_old(node.driver, node.cuda):
            oldest = ".".join(map(str, _OLDEST_DRIVERS[_major(node.cuda)]))
            yield Problem(
                True,
                f"{name}: the NVIDIA driver {node.driver} is too old for torch's CUDA {node.cuda}. Install {oldest} or "
                "newer, or a torch for an older CUDA.",
            )


def machine_problems(nodes: Mapping[str, NodeFacts], *, uses_rdma: bool) -> Iterator[Problem]:
    """Limits and devices.

    Args:
        uses_rdma: whether ``kv_transfer.transport`` is nixl.
    """
    for name, node in nodes.items():
        if node.shm_free_bytes < _LEAST_SHM_BYTES:
            yield Problem(
                node.shm_free_bytes == 0,
                f"{name}: {_mib(node.shm_free_bytes)} of {_mib(node.shm_bytes)} of /dev/shm are free; Ray needs "
                "128 MiB, and NCCL as much. Free some, or start the container with --shm-size=16g.",
            )
        if 0 <= node.max_files < _LEAST_FILES:
            yield Problem(
                False,
                f"{name}: processes may open {node.max_files} files; connections need some thousand. Raise the limit: "
                "LimitNOFILE= in a systemd unit, --ulimit nofile= of a container, or ulimit -n.",
            )
        if uses_rdma and not node.rdma:
            yield Problem(
                False,
                f"{name}: there is no device for RDMA in /sys/class/infiniband, so NIXL uses TCP. Load its driver and "
                "pass it into the container, or set kv_transfer.transport to grpc.",
            )
        elif uses_rdma and node.max_locked_bytes >= 0:
            yield Problem(
                False,
                f"{name}: processes may lock only {_mib(node.max_locked_bytes)} of memory, and RDMA locks its buffers. "
                "Set LimitMEMLOCK=infinity in the systemd unit, or --ulimit memlock=-1.",
            )


def clock_problems(offsets_s: Mapping[str, float]) -> Iterator[Problem]:
    """Clocks that differ from the head's.

    Args:
        offsets_s: by how much each node's clock is ahead.
    """
    for name, offset_s in offsets_s.items():
        if abs(offset_s) > _LARGEST_OFFSET_S:
            yield Problem(
                False,
                f"{name}: its clock is {abs(offset_s):.1f} s {'ahead of' if offset_s > 0 else 'behind'} the head's, so "
                "logs and traces are out of order. Synchronize the clocks, for example with chrony.",
            )


def model_problems(model: str, nodes: Mapping[str, NodeFacts], *, is_folder: bool) -> Iterator[Problem]:
    """Models that are missing. Fatal for a local folder, which no node can fetch."""
    missing = [name for name, node in nodes.items() if node.has_model is False]
    if missing and is_folder:
        yield Problem(
            True, f"{', '.join(missing)}: {model} does not exist. Share the folder, or copy it to every node."
        )
    elif missing:
        yield Problem(False, f"{', '.join(missing)}: {model} is not in the cache, so the first start fetches it.")


def _is_too_old(driver: str, cuda: str) -> bool:
    oldest = _OLDEST_DRIVERS.get(_major(cuda))
    own = tuple(int(part) for part in driver.split(".")[:2] if part.isdigit())
    return oldest is not None and own < oldest


def _major(version: str) -> int:
    return int(version.split(".")[0])


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
