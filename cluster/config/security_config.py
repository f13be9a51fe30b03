"""The section ``security`` of the configuration: how the cluster's processes trust each other."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import model_validator

from baton.core.config_section import NonEmptyString, Section

if TYPE_CHECKING:
    from baton.rpc.credentials import PeerCredentials


class SecurityConfig(Section):
    """Mutual TLS between the cluster's processes; all three keys or none. ``baton certs`` creates the files.

    The files are read on every node, from the same paths. Without them, calls still carry a token that only processes
    of the cluster can make, but anyone on the network can read and change what is sent.
    """

    ca: NonEmptyString | None = None
    """PEM file with the certificate of the cluster's authority, the same on all nodes."""
    certificate: NonEmptyString | None = None
    """PEM file with this node's certificate."""
    key: NonEmptyString | None = None
    """PEM file with the private key of this node's certificate."""

    @model_validator(mode="after")
    def _all_or_none(self) -> SecurityConfig:
        files = {"ca": self.ca, "certificate": self.certificate, "key": self.key}
        missing = [name for name, path in files.items() if path is None]
        if 0 < len(missing) < len(files):
            verb = "is" if len(missing) == 1 else "are"
            raise ValueError(f"security needs ca, certificate and key together; {' and '.join(missing)} {verb} missing")
        return self

    def credentials(self, secret: bytes) -> PeerCredentials:
        """This process's credentials.

        Args:
            secret: the cluster's secret, which its controller created.

        Raises:
            ConfigError: a file cannot be read on this node, or does not fit the others.
        """
        # These load gRPC, which a configuration does not need.
        from baton.rpc.credentials import ClusterSecret, PeerCredentials
        from baton.rpc.node_certificates import NodeCertificates

        if self.ca is None or self.certificate is None or self.key is None:
            return PeerCredentials(ClusterSecret(secret))
        certificates = NodeCertificates(Path(self.ca), Path(self.certificate), Path(self.key))
        return PeerCredentials(ClusterSecret(secret), certificates.current)
