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
        host: bytes of the host's memory for each device, all of a node in use; None: not known.
        host_link: bytes a second between a device and its host, in one direction; None: not known.
        host_bandwidth: bytes a second of the host's memory for each device; None: not known.
        disk: bytes a second to and from the disks of a node, for each device; None: not known.
    """

    name: str
    memory: float
    flops: Mapping[str, float]
    bandwidth: float
    link: float
    network: float
    node: int = 8
    efficiency: float = 0.5
    host: float | None = None
    host_link: float | None = None
    host_bandwidth: float | None = None
    disk: float | None = None

    def __post_init__(self) -> None:
        figures = {f"flops[{name!r}]": figure for name, figure in self.flops.items()}
        for field in ("memory", "bandwidth", "link", "network", "node", "efficiency"):
            figures[field] = getattr(self, field)
        for field in ("host", "host_link", "host_bandwidth", "disk"):
            if getattr(self, field) is not None:
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
        # 16 to a DGX-2, which has 8 links of 100 Gbit/s to the network, 1.5 TB of memory in 12
        # channels of DDR4-2666, and PCIe 3. No bfloat16: float16.
        Hardware(
            "v100-32gb",
            32 * _GB,
            {"float64": 7.8 * _TF, "float32": 15.7 * _TF, "float16": 125 * _TF},
            900 * _GB,
            150 * _GB,
            6.25 * _GB,
            16,
            host=1536 * _GB / 16,
            host_link=16 * _GB,
            host_bandwidth=256 * _GB / 16,
        ),
        # 8 to a DGX A100, which has 8 links of 200 Gbit/s, 2 TB of memory in 16 channels of
        # DDR4-3200, and PCIe 4. float32 without TF32.
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
            host=2048 * _GB / 8,
            host_link=32 * _GB,
            host_bandwidth=410 * _GB / 8,
        ),
        # 8 to a DGX H100 or H200, which has 8 links of 400 Gbit/s, 2 TB of memory in 16 channels of
        # DDR5-4800, and PCIe 5.
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
                host=2048 * _GB / 8,
                host_link=64 * _GB,
                host_bandwidth=614 * _GB / 8,
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
