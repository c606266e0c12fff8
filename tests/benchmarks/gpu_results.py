"""What the sections of the GPU benchmark take and return."""

from typing import NamedTuple

from zero_fn.kernels.floors import Floor


class Setting(NamedTuple):
    device: str  # "cuda", or "cpu" in Triton's interpreter
    tiny: bool


class Result(NamedTuple):
    case: str
    what: str
    seconds: float  # median
    floor: Floor
    error: float | None = None  # largest relative one on a sample, against float64
