"""``baton node``: makes machines a Ray cluster for ``baton up``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from baton.core.option_text import is_host_and_port
from baton.process.ports import PortRange
from baton.process.stop_signals import StopEvent, StopSignals
from cluster.cli.cli_reporter import error_console
from cluster.nodes.node_labels import NodePool
from cluster.nodes.ray_ports import DEFAULT_FIRST, DEFAULT_WORKERS, RayPorts
from cluster.nodes.ray_token import FILE_VARIABLE, ensure_token, require_token

if TYPE_CHECKING:
    from cluster.nodes.ray_node import NodeOptions


app = typer.Typer(help="Make machines a cluster for `baton up` (docs/machines.md).", no_args_is_help=True)

PoolOption = Annotated[NodePool, typer.Option("--pool", help="The workers that this machine runs.")]
AddressOption = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="This machine's address, or a network that contains it: 10.0.0.0/8."),
]
CpusOption = Annotated[int | None, typer.Option(min=0, help="CPUs to offer. Default: all.")]
GpusOption = Annotated[int | None, typer.Option(min=0, help="GPUs to offer. Default: all.")]
LabelOption = Annotated[list[str] | None, typer.Option("--label", metavar="KEY=VALUE", help="A label of the node.")]
TokenOption = Annotated[
    Path | None, typer.Option(help="File with the cluster's token. Default: RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token.")
]
PortOption = Annotated[
    int, typer.Option(min=1024, max=65_500, help="First of eight consecutive ports for Ray's services.")
]
WorkerPortsOption = Annotated[
    str, typer.Option(metavar="FIRST-LAST", help="Ports for the processes that Ray starts, one for each.")
]
DrainOption = Annotated[
    float, typer.Option(min=0, help="How long running requests may take when the machine leaves, in seconds.")
]


@app.command()
def start(
    pool: PoolOption = NodePool.NONE,
    address: AddressOption = None,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    label: LabelOption = None,
    token_file: TokenOption = None,
    port: PortOption = DEFAULT_FIRST,
    worker_ports: WorkerPortsOption = str(DEFAULT_WORKERS),
) -> None:
    """Run the head of a new Ray cluster on this machine. Ctrl-C ends it.

    Makes the cluster's token if there is none. Run `baton up` on the same machine and as the same user.
    """
    from cluster.nodes.ray_node import run_head

    _use_token_file(token_file)
    options = _options(pool, address, cpus, gpus, label, port, worker_ports)
    _run(lambda report, stop: run_head(options, report, stop))


@app.command()
def join(
    head: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the head, such as 10.0.0.1:6379.")],
    pool: PoolOption = NodePool.ANY,
    address: AddressOption = None,
    cpus: CpusOption = None,
    gpus: GpusOption = None,
    label: LabelOption = None,
    token_file: TokenOption = None,
    port: PortOption = DEFAULT_FIRST,
    worker_ports: WorkerPortsOption = str(DEFAULT_WORKERS),
    drain_timeout: DrainOption = 600.0,
) -> None:
    """Add this machine to a cluster. Ctrl-C or SIGTERM drains its workers and ends it.

    Needs the cluster's token (`baton node token` on the head), and the head's versions of Python, Ray and baton.
    """
    from cluster.nodes.ray_node import run_member

    _check_address(head)
    _use_token_file(token_file)
    options = _options(pool, address, cpus, gpus, label, port, worker_ports, drain_timeout)
    _run(lambda report, stop: run_member(head, options, report, stop))


@app.command()
def drain(
    head: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Address of the head, such as 10.0.0.1:6379.")],
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Address of the node. Default: those of this machine.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0, help="Longest wait, in seconds.")] = 600.0,
    whole_cluster: Annotated[
        bool,
        typer.Option(
            "--whole-cluster",
            help="Only announce that the whole cluster ends: nodes drained after this stay until the head has ended.",
        ),
    ] = False,
    token_file: TokenOption = None,
) -> None:
    """Drain a node whose pod is about to end, and wait until it has left the cluster.

    Its workers get no new requests, and end when those in flight have ended. Needs the cluster's token. Ending
    `baton node join` does the same for the node that it runs.
    """
    from cluster.config.network_config import own_addresses
    from cluster.nodes.node_leaving import leave_cluster
    from cluster.nodes.ray_head import RayHead

    _check_address(head)
    _use_token_file(token_file)
    ray_head = RayHead(head, require_token())
    if whole_cluster:
        ray_head.announce_end()
        return
    report = _reporter()
    leave_cluster(ray_head, own_addresses() if address is None else [address.strip("[]")], timeout, report)


@app.command()
def token(token_file: TokenOption = None) -> None:
    """Print the token that all machines of the cluster need, and make it if there is none.

    The token lets its holder run code on every machine of the cluster. Copy it without displaying it, for example:
    baton node token | ssh HOST 'umask 077; mkdir -p ~/.ray; cat > ~/.ray/auth_token'
    """
    _use_token_file(token_file)
    sys.stdout.write(ensure_token() + "\n")


def _options(
    pool: NodePool,
    address: str | None,
    cpus: int | None,
    gpus: int | None,
    labels: list[str] | None,
    port: int,
    worker_ports: str,
    drain_timeout_s: float = 0.0,
) -> NodeOptions:
    from cluster.nodes.ray_node import NodeOptions

    pairs = {}
    for text in labels or []:
        key, separator, value = text.partition("=")
        if not (key and separator and value):
            raise typer.BadParameter(f"{text!r} is not a label; expected KEY=VALUE.")
        pairs[key] = value
    try:
        ports = RayPorts(port, PortRange.parse(worker_ports))
    except ValueError as error:
        raise typer.BadParameter(f"--worker-ports: {error}.") from error
    return NodeOptions(pool, address, cpus, gpus, pairs, ports, drain_timeout_s)


def _check_address(head: str) -> None:
    if not is_host_and_port(head):
        raise typer.BadParameter(
            f"{head!r} is not an address; expected HOST:PORT with a port from 1 to 65535, such as 10.0.0.1:6379."
        )


def _use_token_file(file: Path | None) -> None:
    """Lets this process and Ray's, which inherit the variable, find the token there."""
    if file is not None:
        os.environ[FILE_VARIABLE] = str(file.expanduser().absolute())


def _run(node: Callable[[Callable[[str], None], StopEvent], None]) -> None:
    report = _reporter()
    with StopSignals() as signals:
        signals.end_of_start()
        node(report, signals.stop)


def _reporter() -> Callable[[str], None]:
    console = error_console()
    return lambda line: console.print(line, markup=False, soft_wrap=True)
