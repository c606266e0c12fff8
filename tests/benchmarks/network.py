"""A slow network on one machine: two network namespaces, joined by a pair of interfaces.

What leaves either end passes a token bucket (``tc tbf``) of the rate that is asked for. It takes
root, and ``ip`` and ``tc`` (Debian's package iproute2); nothing outside of the namespaces changes.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

BURST = 0.002  # seconds of the rate that may leave at once; at least a segment of 32 KiB
LATENCY = "50ms"  # what may wait, so that nothing is lost


class Unavailable(Exception):
    """Namespaces cannot be made here, and why."""


class End(NamedTuple):
    """One of the two hosts.

    Attributes:
        namespace: the name of its network namespace.
        interface: its interface there.
        address: the interface's address.
    """

    namespace: str
    interface: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What stands before a command that is to run there."""
        return ["ip", "netns", "exec", self.namespace]

    def limit(self, rate: float | None) -> None:
        """Let at most ``rate`` bits a second leave; None: as many as come."""
        with suppress(subprocess.CalledProcessError):  # there was no limit
            _run(*self.prefix, "tc", "qdisc", "del", "dev", self.interface, "root")
        if rate is not None:
            burst = max(int(rate * BURST / 8), 32 << 10)
            _run(*self.prefix, "tc", "qdisc", "add", "dev", self.interface, "root", "tbf",
                 "rate", f"{rate:.0f}bit", "burst", f"{burst}b", "latency", LATENCY)  # fmt: skip


@contextmanager
def two_hosts() -> Iterator[tuple[End, End]]:
    """Two hosts that see each other only.

    Raises:
        Unavailable: saying what is missing.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise Unavailable(f"there is no `{program}`; install iproute2")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces take root")
    name = f"zero_fn{os.getpid()}"
    first, second = ends = tuple(
        End(f"{name}{letter}", f"veth{letter}", f"10.77.0.{place}")
        for place, letter in enumerate("ab", 1)
    )
    try:
        for end in ends:
            _run("ip", "netns", "add", end.namespace)
        _run("ip", "link", "add", first.interface, "netns", first.namespace, "type", "veth",
             "peer", "name", second.interface, "netns", second.namespace)  # fmt: skip
        for end in ends:
            inside = ("ip", "-n", end.namespace)
            _run(*inside, "address", "add", f"{end.address}/24", "dev", end.interface)
            for interface in ("lo", end.interface):
                _run(*inside, "link", "set", interface, "up")
        first.limit(1e9)  # whether tc may
        first.limit(None)
    except subprocess.CalledProcessError as problem:
        _remove(ends)
        raise Unavailable(f"`{' '.join(problem.cmd)}` says: {problem.stderr.strip()}") from None
    try:
        yield first, second
    finally:
        _remove(ends)


def _remove(ends: tuple[End, ...]) -> None:
    for end in ends:
        with suppress(subprocess.CalledProcessError):
            _run("ip", "netns", "del", end.namespace)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)


def sent_over(interface: str) -> int:
    """The bytes that have left over an interface of this namespace, headers and all."""
    with open("/proc/net/dev") as lines:
        for line in lines:
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                return int(numbers.split()[8])
    raise ValueError(f"there is no interface {interface!r} here")
