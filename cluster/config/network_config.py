"""The section ``network``: where workers listen and how other machines reach them."""

from __future__ import annotations

import ipaddress
import socket

import psutil
from pydantic import field_validator

from baton.core.config_section import NonEmptyString, Section
from baton.core.errors import ConfigError
from baton.process.ports import PortRange


class NetworkConfig(Section):
    """Addresses and ports of the workers."""

    address: NonEmptyString | None = None
    """Where each worker listens and is reached: an address, or a network such as 10.0.0.0/8, in which each node has an
    address. null: the node's address in Ray; on a local cluster, 127.0.0.1."""
    ports: NonEmptyString | None = None
    """The ports on which workers listen, such as 20000-20100; null: any free port."""

    @field_validator("ports")
    @classmethod
    def _a_range(cls, ports: str | None) -> str | None:
        PortRange.parse(ports)
        return ports

    @field_validator("address")
    @classmethod
    def _address_or_network(cls, address: str | None) -> str | None:
        try:
            if address is not None:
                ipaddress.ip_network(address, strict=False)
        except ValueError:
            raise ValueError(
                f"{address!r} is neither an IP address nor a network; expected one such as 10.0.0.5 or 10.0.0.0/8"
            ) from None
        return address

    @property
    def port_range(self) -> PortRange:
        return PortRange.parse(self.ports)

    def address_here(self, default: str) -> str:
        """The address of this node, for workers to listen at.

        Args:
            default: the address without ``address``.

        Raises:
            ConfigError: no interface of this node has such an address.
        """
        if self.address is None:
            return default
        network = ipaddress.ip_network(self.address, strict=False)
        own = own_addresses()
        for address in own:
            if ipaddress.ip_address(address) in network:
                return f"[{address}]" if ":" in address else address
        raise ConfigError(
            f"network.address is {self.address}, but the node {socket.gethostname()} has only the addresses "
            f"{', '.join(own)}. Name a network in which every node has an address."
        )


def own_addresses() -> list[str]:
    """All IP addresses of this machine's interfaces."""
    families = (socket.AF_INET, socket.AF_INET6)
    found = (address for addresses in psutil.net_if_addrs().values() for address in addresses)
    return [address.address.partition("%")[0] for address in found if address.family in families]
