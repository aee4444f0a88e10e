"""A network of the test's own: a namespace for each node, joined by a bridge in another one, whose links can be cut.

Nothing of it is in the machine's own network. Needs `ip` and the right to make namespaces.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CLONE_NEWNET = 0x40000000
SUBNET = "10.77.0"


@dataclass
class Network:
    """Namespaces by the names of nodes; the address of a node is `SUBNET` and its number."""

    prefix: str = field(default_factory=lambda: f"wk{secrets.token_hex(3)}")
    numbers: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _ip("netns", "add", self.prefix)
        _ip("-n", self.prefix, "link", "add", "bridge", "type", "bridge")
        _ip("-n", self.prefix, "link", "set", "bridge", "up")

    def join(self, name: str) -> str:
        """Return the address of a node, with a namespace and a link of its own."""
        if name not in self.numbers:
            number = self.numbers[name] = len(self.numbers) + 1
            space, link = self._space(name), f"link{number}"
            _ip("netns", "add", space)
            _ip("-n", space, "link", "set", "lo", "up")
            _ip("-n", space, "link", "add", "eth0", "type", "veth", "peer", "name", link, "netns", self.prefix)
            _ip("-n", space, "addr", "add", f"{SUBNET}.{number}/24", "dev", "eth0")
            _ip("-n", space, "link", "set", "eth0", "up")
            _ip("-n", self.prefix, "link", "set", link, "master", "bridge", "up")
        return f"{SUBNET}.{self.numbers[name]}"

    def cut(self, name: str) -> None:
        _ip("-n", self.prefix, "link", "set", f"link{self.numbers[name]}", "down")

    def heal(self, name: str) -> None:
        _ip("-n", self.prefix, "link", "set", f"link{self.numbers[name]}", "up")

    def within(self, name: str) -> list[str]:
        """What a command begins with that is to run in a node's namespace."""
        return ["ip", "netns", "exec", self._space(name)]

    @contextmanager
    def entered(self, name: str) -> Iterator[None]:
        """Put this thread, and the threads and processes that it starts, into a node's namespace."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        _enter(f"/run/netns/{self._space(name)}")
        try:
            yield
        finally:
            _set_namespace(before)
            os.close(before)

    def remove(self) -> None:
        for space in [*map(self._space, self.numbers), self.prefix]:
            subprocess.run(["ip", "netns", "del", space], check=False)

    def _space(self, name: str) -> str:
        return f"{self.prefix}-{name}"


def can_make_namespaces() -> bool:
    """Whether this machine lets us, found out by doing it."""
    try:
        network = Network()
    except (OSError, subprocess.CalledProcessError):
        return False
    try:
        network.join("probe")
        return True
    except subprocess.CalledProcessError:
        return False
    finally:
        network.remove()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _enter(path: str) -> None:
    space = os.open(path, os.O_RDONLY)
    try:
        _set_namespace(space)
    finally:
        os.close(space)


def _set_namespace(descriptor: int) -> None:
    """`os.setns`, which Python has from 3.12 on."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.setns(descriptor, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter the network namespace")
