"""What is on the device while each operation runs, and what lives elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ..accounting import PARTS, Moment
from ..naming import suggestion
from ..program import Peak, Program

Place = Literal["host", "disk"]
Offload = Mapping[str, Place]  # parts of memory to where they live

MOVABLE = ("parameters", "gradients", "optimizer state")
_SLOTS = 2  # files of a leaf on disk: a step reads one and writes the other
Turn = tuple[str, str, str]  # an operation, its line, and which of its turns
Turns = Mapping[Turn, Moment]  # what is alive then


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
    moments = program.memory_timeline()
    away = {
        "host": max(moment.bytes for moment in program.memory_timeline("host")),
        "disk": sum(program.at_rest("disk").values()),
    }
    for part, place in offload.items():
        away[place] += max(moment.parts.get(part, 0) for moment in moments)
    kept = largest_step([moment.parts.get("gradients", 0) for moment in moments])
    here = []
    for moment in moments:
        parts = {part: moment.parts.get(part, 0) for part in PARTS}
        for part in offload:
            parts[part] = min(parts[part], kept) if part == "gradients" else 0
        here.append(Moment(moment.operation, sum(parts.values()), parts))
    at_rest = {part: 0 if part in offload else size for part, size in program.at_rest().items()}
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
    return Peak(moment.bytes, moment.parts, inputs, moment.operation, program.lines()[place])


def most_of(moments: Iterable[Moment]) -> dict[str, int]:
    """For each part the most that it ever takes."""
    found = dict.fromkeys(PARTS, 0)
    for moment in moments:
        for part, size in moment.parts.items():
            found[part] = max(found[part], size)
    return found


def states_of(moments: Iterable[Moment]) -> int:
    """The most that parameters, their copies, gradients and optimizer state take together."""
    owned = ("parameters", "gathered parameters", "gradients", "optimizer state")
    return max(sum(moment.parts.get(part, 0) for part in owned) for moment in moments)


def turns_of(program: Program, moments: Sequence[Moment]) -> Turns:
    """What is alive at the first, the last and the highest turn of each operation of a line."""
    found: dict[Turn, Moment] = {}
    for moment, line in zip(moments, program.lines(), strict=True):
        operation = moment.operation.split(" = ")[-1]
        first, last, high = ((operation, line, w) for w in ("first", "last", "high"))
        found.setdefault(first, moment)
        found[last] = moment
        if high not in found or found[high].bytes < moment.bytes:
            found[high] = moment
    return found
