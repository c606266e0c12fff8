"""Hardware in figures: what a plan divides bytes and operations by.

The figures of the known devices are their makers' (data sheets of NVIDIA's V100 SXM2, A100 SXM,
H100 SXM and H200 SXM, and of the DGX machines that hold them), for dense operations, in one
direction.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .naming import suggestion


@dataclass(frozen=True)
class Hardware:
    """A device, and how it is joined to others.

    Attributes:
        name: what to call it.
        memory: bytes of device memory.
        flops: floating-point operations a second at most, by the dtype's name, as in
            ``{"float32": 19.5e12, "bfloat16": 312e12}``.
        bandwidth: bytes a second of device memory.
        link: bytes a second that a device sends to the others of its node.
        network: bytes a second that a device sends to other nodes, when all of its node do.
        node: devices of a node.
        efficiency: the share of ``flops`` that matrix products reach: an assumption.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    node: int = 8
    efficiency: float = 0.5

    def __post_init__(self) -> None:
        figures = {f"flops[{name!r}]": figure for name, figure in self.flops.items()}
        for field in ("memory", "bandwidth", "link", "network", "node", "efficiency"):
            figures[field] = getattr(self, field)
        for field, figure in figures.items():
            if not figure > 0:
                raise ValueError(f"{field} of {self.name!r} is {figure!r}; it is more than 0")
        if self.efficiency > 1:
            raise ValueError(f"efficiency of {self.name!r} is {self.efficiency}; it is at most 1")

    def flops_of(self, dtype: torch.dtype) -> float:
        """The operations a second in a dtype.

        Raises:
            ValueError: if they are not known.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.flops:
            raise ValueError(
                f"{self.name!r} has no figure for {name}: it computes in {', '.join(self.flops)}"
            )
        return self.flops[name]


_GB, _TF = 1e9, 1e12

KNOWN = {
    hardware.name: hardware
    for hardware in (
        # 16 to a DGX-2, which has 8 links of 100 Gbit/s to the network. No bfloat16: float16.
        Hardware(
            "v100-32gb",
            32 * _GB,
            {"float64": 7.8 * _TF, "float32": 15.7 * _TF, "float16": 125 * _TF},
            900 * _GB,
            150 * _GB,
            6.25 * _GB,
            16,
        ),
        # 8 to a DGX A100, which has 8 links of 200 Gbit/s. float32 without TF32.
        Hardware(
            "a100-80gb",
            80 * _GB,
            {
                "float64": 19.5 * _TF,
                "float32": 19.5 * _TF,
                "bfloat16": 312 * _TF,
                "float16": 312 * _TF,
            },
            2039 * _GB,
            300 * _GB,
            25 * _GB,
        ),
        # 8 to a DGX H100 or H200, which has 8 links of 400 Gbit/s.
        *(
            Hardware(
                name,
                memory * _GB,
                {
                    "float64": 67 * _TF,
                    "float32": 67 * _TF,
                    "bfloat16": 989 * _TF,
                    "float16": 989 * _TF,
                },
                bandwidth * _GB,
                450 * _GB,
                50 * _GB,
            )
            for name, memory, bandwidth in (("h100", 80, 3350), ("h200", 141, 4800))
        ),
    )
}


def hardware(name: str) -> Hardware:
    """A known device by name: ``"v100-32gb"``, ``"a100-80gb"``, ``"h100"`` or ``"h200"``.

    ``dataclasses.replace(hardware("h100"), efficiency=0.4)`` changes a figure.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in KNOWN:
        raise ValueError(
            f"no hardware {name!r}; {suggestion(name, KNOWN)}. Others: zf.Hardware(name, ...)"
        )
    return KNOWN[name]
