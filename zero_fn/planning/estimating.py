"""Seconds from bytes and operations, and what a device holds when parts of it live elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from ..accounting import PARTS, Collective, Moment, Work
from ..hardware import Hardware
from ..naming import size_of, suggestion
from ..program import Peak, Program

Place = Literal["host", "disk"]
Offload = Mapping[str, Place]  # parts of memory to where they live

MOVABLE = ("parameters", "gradients", "optimizer state")
_SLOTS = 2  # files of a leaf on disk: a step reads one and writes the other


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


class Resident(NamedTuple):
    """What lives where.

    Attributes:
        rest: on the device between steps, by what it is.
        moments: on the device while each operation runs.
        host: bytes on the host.
        disk: bytes on disk, both files of each leaf.
    """

    rest: dict[str, int]
    moments: list[Moment]
    host: int
    disk: int


def resident(program: Program, offload: Offload) -> Resident:
    """What is on the device, on the host and on disk.

    An offloaded gradient leaves as soon as it exists: of gradients the device holds the largest one
    at a time (ZeRO-Offload, arXiv 2101.06840, section 4.1). What computes with offloaded parameters
    are copies, gathered or in another dtype, which are counted as they are.

    Raises:
        ValueError: for a part that cannot live elsewhere, or an unknown place.
    """
    for part, place in offload.items():
        if part not in MOVABLE:
            raise ValueError(f"offload has {part!r}; {suggestion(part, MOVABLE)}")
        if place not in ("host", "disk"):
            raise ValueError(f"offload[{part!r}] is {place!r}; it is 'host' or 'disk'")
    rest, files = program.at_rest(), program.in_files()
    moments = program.memory_timeline()
    away = {"host": 0, "disk": sum(files.values())}
    for part, place in offload.items():
        most = max(moment.parts.get(part, 0) for moment in moments)
        away[place] += most - files.get(part, 0)
    kept = largest_step([moment.parts.get("gradients", 0) for moment in moments])
    here = []
    for moment in moments:
        parts = {part: moment.parts.get(part, 0) - files.get(part, 0) for part in PARTS}
        for part in offload:
            parts[part] = min(parts[part], kept) if part == "gradients" else 0
        here.append(Moment(moment.operation, sum(parts.values()), parts))
    at_rest = {
        part: 0 if part in offload else size - files.get(part, 0) for part, size in rest.items()
    }
    return Resident(at_rest, here, away["host"], _SLOTS * away["disk"])


def largest_step(sizes: Sequence[int]) -> int:
    """The most that is added at once."""
    return max(
        (after - before for before, after in zip([0, *sizes], sizes, strict=False)), default=0
    )


def peak_of(program: Program, moments: Sequence[Moment]) -> Peak:
    """The peak on the device: the program's own, but for what lives elsewhere."""
    place = max(range(len(moments)), key=lambda place: moments[place].bytes)
    moment = moments[place]
    inputs = sum(moments[0].parts.values())
    return Peak(moment.bytes, moment.parts, inputs, moment.operation, program.line(place))


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
    sent: dict[str, float] = {}
    for collective in collectives:
        seconds = collective.bytes_sent / _speed(known, sizes, collective.axis)
        sent[collective.axis] = sent.get(collective.axis, 0) + seconds
    computing = sum(_seconds(known, each) for each in work)
    return Estimate(computing, sent, offload=_offload_seconds(known, rest, offload))


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
