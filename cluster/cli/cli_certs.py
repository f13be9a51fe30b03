"""``baton certs``: the certificates with which the processes of a cluster encrypt what they send to each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.core.errors import ConfigError, StorageError
from baton.core.files import replace_file, writing

_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_AUTHORITY_DAYS = 3650


def certs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the files are written.")],
    nodes: Annotated[
        list[str], typer.Option("--node", metavar="NAME", help="A node of the cluster; give it once per node.")
    ],
    days: Annotated[int, typer.Option(min=1, max=3650, help="How long the nodes' certificates are valid.")] = 365,
) -> None:
    """Create an authority, if FOLDER has none, and a certificate for each node. Repeat it to add or renew nodes."""
    for line in create_certificates(folder, nodes, days):
        Console().print(line, highlight=False, soft_wrap=True)


def create_certificates(folder: Path, nodes: list[str], days: int) -> list[str]:
    """Writes ``FOLDER/NODE/{ca.pem, node.pem, node.key}`` for each node. Returns what to do with them.

    Raises:
        ConfigError: a name cannot be a folder, or the folder's authority cannot be used.
        StorageError: a file cannot be written; older ones stay as they were.
    """
    from baton.rpc.certificates import issue_certificate

    for node in nodes:
        if not _NODE.fullmatch(node):
            raise ConfigError(
                f"--node {node!r} is not a name; expected up to 63 letters, digits, dots, hyphens and underscores."
            )
    authority, key = _authority(folder)
    for node in nodes:
        try:
            certificate, node_key = issue_certificate(authority, key, node, days)
        except ValueError as error:
            raise ConfigError(
                f"{folder / 'ca.pem'} and {folder / 'ca.key'} are not an authority of `baton certs`: {error}. "
                "Choose another folder, or remove both files to create a new authority."
            ) from error
        own = folder / node
        _write(own / "ca.pem", authority, mode=0o644)
        _write(own / "node.pem", certificate, mode=0o644)
        _write(own / "node.key", node_key, mode=0o600)
    return [
        f"Copy {folder}/NODE/ to the same place on each node, for example to /etc/baton/certs, and set in the "
        "configuration:",
        "",
        "security:",
        "  ca: /etc/baton/certs/ca.pem",
        "  certificate: /etc/baton/certs/node.pem",
        "  key: /etc/baton/certs/node.key",
        "",
        f"Keep {folder / 'ca.key'} secret and away from the nodes: whoever has it can join the cluster.",
    ]


def _authority(folder: Path) -> tuple[bytes, bytes]:
    """The authority's certificate and key, created if the folder has neither."""
    from baton.rpc.certificates import create_authority

    certificate, key = folder / "ca.pem", folder / "ca.key"
    if not certificate.exists() and not key.exists():
        made = create_authority(_AUTHORITY_DAYS)
        _write(key, made[1], mode=0o600)
        try:
            _write(certificate, made[0], mode=0o644)
        except StorageError:
            key.unlink()
            raise
        return made
    try:
        return certificate.read_bytes(), key.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{error.filename} cannot be read: {error.strerror}. New certificates need both files of the authority."
        ) from error


def _write(path: Path, data: bytes, *, mode: int) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        replace_file(path, data, mode)
