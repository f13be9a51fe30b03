"""Hosts of their own, for tests: network namespaces of this machine, joined by a bridge. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_NETWORK = "10.213.77"
OWN_ADDRESS = f"{_NETWORK}.254"
"""Of this machine in the network of the hosts."""
_BRIDGE = "bridge0"
_PORT = "port0"
_END_S = 10.0


@dataclass
class Host:
    """One namespace.

    Attributes:
        address: in the network that all hosts share.
    """

    namespace: str
    address: str
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, arguments: Sequence[str]) -> list[str]:
        """A command line that runs ``arguments`` on this host."""
        return ["ip", "netns", "exec", self.namespace, *arguments]

    def start(
        self, arguments: Sequence[str], log: Path, variables: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a program, which ends with the host."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                self.command(arguments),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(variables or {})},
                start_new_session=True,
            )
        self._processes.append(process)
        return process

    def has_ended(self) -> bool:
        """Whether a program that was started here has ended."""
        return any(process.poll() is not None for process in self._processes)

    def forget_ended(self) -> None:
        """Takes programs that have ended as expected out of :meth:`has_ended`."""
        self._processes = [process for process in self._processes if process.poll() is None]

    def run(self, arguments: Sequence[str], timeout_s: float) -> str:
        """What a program prints.

        Raises:
            CalledProcessError: it fails.
            TimeoutExpired: it takes too long.
        """
        done = subprocess.run(self.command(arguments), capture_output=True, text=True, timeout=timeout_s, check=True)
        return done.stdout

    def sent_bytes(self) -> int:
        """Bytes that left this host so far."""
        name = _BRIDGE if _has_link(self.namespace, _BRIDGE) else _PORT
        return int(self.run(["cat", f"/sys/class/net/{name}/statistics/tx_bytes"], 10))

    def accept_only(self, ports: Sequence[str]) -> None:
        """Drops new connections from other hosts, except to these TCP ports and ranges such as ``20000:20100``."""
        rules = [["-i", "lo"], ["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED"], ["-p", "icmp"]]
        rules += [["-p", "tcp", "--dport", port] for port in ports]
        for rule in rules:
            self.run(["iptables", "-A", "INPUT", *rule, "-j", "ACCEPT"], 10)
        self.run(["iptables", "-P", "INPUT", "DROP"], 10)

    def cut_off(self) -> None:
        """Takes this host from the network. Not for the host that has the bridge."""
        self.run(["ip", "link", "set", _PORT, "down"], 10)

    def reconnect(self) -> None:
        self.run(["ip", "link", "set", _PORT, "up"], 10)

    @contextmanager
    def disconnected(self) -> Iterator[None]:
        """Takes this host from the network for a while, as :meth:`cut_off` does."""
        self.cut_off()
        try:
            yield
        finally:
            self.reconnect()

    @contextmanager
    def dropping(self, *match: str) -> Iterator[None]:
        """Drops outgoing packets for a while: all, or those that match options of iptables."""
        rule = ["OUTPUT", *match, "-j", "DROP"]
        self.run(["iptables", "-A", *rule], 10)
        try:
            yield
        finally:
            self.run(["iptables", "-D", *rule], 10)

    @contextmanager
    def slowed(self, rate: str) -> Iterator[None]:
        """Limits what this host sends for a while, to a rate such as ``10mbit``. Not for the host with the bridge."""
        shape = ["tbf", "rate", rate, "burst", "64kb", "latency", "400ms"]
        self.run(["tc", "qdisc", "add", "dev", _PORT, "root", *shape], 10)
        try:
            yield
        finally:
            self.run(["tc", "qdisc", "delete", "dev", _PORT, "root"], 10)

    def pids(self) -> list[int]:
        """Processes that are on this host."""
        found = _ip("netns", "pids", self.namespace)
        return [int(pid) for pid in found.split()]

    def end(self) -> None:
        """Ends all processes of this host."""
        deadline = time.monotonic() + _END_S
        while pids := self.pids():
            wanted = signal.SIGTERM if time.monotonic() < deadline - _END_S / 2 else signal.SIGKILL
            for pid in pids:
                try:
                    os.kill(pid, wanted)
                except ProcessLookupError:
                    continue
            for process in self._processes:
                process.poll()
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} of {self.namespace} do not end")
            time.sleep(0.1)
        for process in self._processes:
            process.wait()


def why_no_namespaces() -> str:
    """Why this machine cannot make network namespaces; empty if it can."""
    if os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need iproute2"
    name = f"baton-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("netns", "delete", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return ""


def why_no_firewall() -> str:
    """Why hosts cannot close their ports; empty if they can."""
    name = f"baton-{os.getpid()}-probe"
    if shutil.which("iptables") is None:
        return "firewalls need iptables"
    _ip("netns", "add", name)
    try:
        Host(name, "").accept_only(["1:2"])
    except subprocess.CalledProcessError as error:
        return f"firewalls cannot be made here: {error.stderr.strip()}"
    finally:
        _ip("netns", "delete", name)
    return ""


@contextmanager
def hosts(names: Sequence[str]) -> Iterator[dict[str, Host]]:
    """Hosts by name, of which the first one has the bridge. They end with all their processes.

    This machine can reach them meanwhile.
    """
    made: dict[str, Host] = {}
    try:
        for index, name in enumerate(names):
            host = Host(f"baton-{os.getpid()}-{name}", f"{_NETWORK}.{index + 1}")
            _ip("netns", "add", host.namespace)
            made[name] = host
            _ip("-n", host.namespace, "link", "set", "lo", "up")
            first = next(iter(made.values()))
            if host is first:
                _ip("-n", host.namespace, "link", "add", _BRIDGE, "type", "bridge")
                link = _BRIDGE
            else:
                far = f"port{index}"
                peer = ("type", "veth", "peer", "name", far, "netns", first.namespace)
                _ip("-n", host.namespace, "link", "add", _PORT, *peer)
                _ip("-n", first.namespace, "link", "set", far, "master", _BRIDGE, "up")
                link = _PORT
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", link)
            _ip("-n", host.namespace, "link", "set", link, "up")
        _join_network(next(iter(made.values())))
        yield dict(made)
    finally:
        for host in reversed(made.values()):
            host.end()
            _ip("netns", "delete", host.namespace)


def _join_network(first: Host) -> None:
    """Gives this machine an address in the network, for as long as the host with the bridge exists."""
    own, far = f"baton{os.getpid()}", "outside"
    _ip("link", "add", own, "type", "veth", "peer", "name", far, "netns", first.namespace)
    _ip("-n", first.namespace, "link", "set", far, "master", _BRIDGE, "up")
    _ip("address", "add", f"{OWN_ADDRESS}/24", "dev", own)
    _ip("link", "set", own, "up")


def _has_link(namespace: str, name: str) -> bool:
    return f" {name}: " in _ip("-n", namespace, "link", "show")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=30, check=True)
    return done.stdout
