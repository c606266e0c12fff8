"""Seconds from bytes and operations: estimates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..accounting import Collective, Work
from ..hardware import Hardware
from ..naming import size_of
from .residing import Offload


class Estimate(NamedTuple):
    """The seconds of a step: an estimate.

    Every operation takes as long as its floating-point operations at the hardware's efficiency, or
    its bytes at the memory's bandwidth, whichever is longer; a collective as long as its bytes on
    the slowest way it takes, without latency. Operations that a compiler fuses take less.

    Attributes:
        compute: of the operations.
        communication: of the collectives, by axis.
        idle: in which this rank of a pipeline waits for others to compute.
        offload: of what moves between the device and its host or disk, and of the update there.
    """

    compute: float
    communication: Mapping[str, float]
    idle: float = 0.0
    offload: float = 0.0

    @property
    def overlapped(self) -> float:
        """A step whose communication hides behind computation as far as it can."""
        return max(self.compute, sum(self.communication.values())) + self.idle + self.offload

    @property
    def serial(self) -> float:
        """A step that computes while nothing is sent."""
        return self.compute + sum(self.communication.values()) + self.idle + self.offload


def estimate(
    known: Hardware,
    sizes: Mapping[str, int],
    work: Sequence[Work],
    collectives: Sequence[Collective],
    rest: Mapping[str, int],
    offload: Offload,
) -> Estimate:
    """The seconds of a step on some hardware.

    Args:
        known: the hardware.
        sizes: of the mesh's axes, in their order.
        work: what each operation has to do.
        collectives: what is sent.
        rest: the bytes between steps by what they are, wherever they live.
        offload: where they live.

    Raises:
        ValueError: for a dtype, or a place, that the hardware has no figure for.
    """
    computing = sum(_seconds(known, each) for each in work)
    return Estimate(
        computing,
        communication_of(known, sizes, collectives),
        offload=_offload_seconds(known, rest, offload),
    )


def communication_of(
    known: Hardware, sizes: Mapping[str, int], collectives: Sequence[Collective]
) -> dict[str, float]:
    """The seconds of the collectives, by axis, of a mesh of these sizes."""
    sent: dict[str, float] = {}
    for collective in collectives:
        seconds = collective.bytes_sent / _speed(known, sizes, collective.axis)
        sent[collective.axis] = sent.get(collective.axis, 0) + seconds
    return sent


def check_room(known: Hardware, host: int) -> None:
    """Refuse hardware without a figure for its host, where something lives there."""
    if host and known.host is None:
        raise ValueError(
            f"{size_of(host)} live on the host, and {known.name!r} has no figure for its memory; "
            f"dataclasses.replace(hardware({known.name!r}), host=...)"
        )


def _offload_seconds(known: Hardware, rest: Mapping[str, int], offload: Offload) -> float:
    """Gradients go and parameters come once a step; the update runs where its state lives.

    The update reads and writes parameters and moments, and reads gradients: of float32 Adam 28
    bytes a parameter, from 16.
    """
    if not offload:
        return 0.0
    parameters = rest.get("parameters", 0)
    found = 2 * parameters / _figure(known, "host_link")
    if "optimizer state" in offload:
        moments = rest.get("optimizer state", 0)
        found += (3 * parameters + 2 * moments) / _figure(known, "host_bandwidth")
    on_disk = sum(rest.get(part, 0) for part, place in offload.items() if place == "disk")
    return found + (2 * on_disk / _figure(known, "disk") if on_disk else 0.0)


def _figure(known: Hardware, name: str) -> float:
    figure = getattr(known, name)
    if figure is None:
        raise ValueError(
            f"{known.name!r} has no figure for {name}, which offload needs; "
            f"dataclasses.replace(zf.hardware({known.name!r}), {name}=...)"
        )
    return float(figure)


def _seconds(known: Hardware, work: Work) -> float:
    moving = work.bytes / known.bandwidth
    if not work.flops or work.dtype is None:
        return moving
    return max(moving, work.flops / (known.flops_of(work.dtype) * known.efficiency))


def _speed(known: Hardware, sizes: Mapping[str, int], axis: str) -> float:
    """Bytes a second between neighbours on an axis: the axis named last changes fastest."""
    names = [*sizes]
    apart = 1
    for name in names[names.index(axis) :] if axis in names else []:
        apart *= sizes[name]
    return known.link if apart <= known.node else known.network
