"""A device for tests, made of host memory: it computes on the CPU, and refuses what a GPU refuses.

Its tensors say that they are on ``accel:0``. An operation that mixes them with tensors on the host,
numbers apart, is an error as on a GPU, and only copies go from one to the other. The device is the
process's for good, so tests run functions on it in a process of their own.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils import backend_registration

DEVICE = torch.device("cpu")  # until `start`
_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten.copy.default, _aten._to_copy.default)
_kept: list[torch.library.Library] = []  # a library's kernels last as long as it


def start() -> torch.device:
    """Register the device with torch, once in a process."""
    global DEVICE
    if not _kept:
        backend_registration._setup_privateuseone_for_python_backend("accel")
        DEVICE = torch.device("accel:0")
        library = torch.library.Library("aten", "IMPL")
        for name in ("empty.memory_format", "empty_strided"):
            library.impl(name, _made(getattr(_aten, name.partition(".")[0])), "PrivateUse1")
        library.impl("_to_copy", _arrived, "PrivateUse1")
        _kept.append(library)
    return DEVICE


class OnDevice(Tensor):
    """A tensor whose memory is ``raw``'s, on the device."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> "OnDevice":
        x = Tensor._make_subclass(
            cls, raw, False, dispatch_device=True, device_for_backend_keys=DEVICE
        )
        x.raw = raw
        return x

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DEVICE if op is torch.ops.prim.device.default else _run(op, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.raw})"


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat, treedef = pytree.tree_flatten((args, kwargs))
    there = [x for x in flat if isinstance(x, OnDevice)]
    here = [x for x in flat if isinstance(x, Tensor) and not isinstance(x, OnDevice)]
    if str(op) in ("zero_fn.adamw.default", "zero_fn.adamw_.default"):
        return _adam(op, args, kwargs)
    # This library's own operations take numbers from anywhere.
    refused = [x for x in there if x.ndim] if op.namespace == "zero_fn" else there
    if refused and op not in _COPIES and any(x.ndim for x in here):
        raise RuntimeError(f"{op}: tensors on {DEVICE} and of {[*map(_told, here)]} on the host")
    own = {id(x.raw): x for x in there}
    raw = [x.raw if isinstance(x, OnDevice) else x for x in flat]
    raw = [torch.device("cpu") if isinstance(x, torch.device) else x for x in raw]
    args, kwargs_ = pytree.tree_unflatten(raw, treedef)
    device = kwargs.get("device")
    stays = bool(there) if device is None else torch.device(device).type == DEVICE.type
    if op in _COPIES[:2]:
        stays = isinstance(flat[0], OnDevice)

    def on_device(x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) in own:
            return own.get(id(x), x)
        return OnDevice(x) if stays else x

    return pytree.tree_map(on_device, op(*args, **kwargs_))


def _adam(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Each leaf of the fused Adam by itself may be here or there."""
    for leaf in zip(*args[:4], strict=True):
        assert len({x.device for x in leaf}) == 1, f"{op}: {[x.device for x in leaf]}"
    raw = pytree.tree_map(lambda x: x.raw if isinstance(x, OnDevice) else x, (args, kwargs))
    found = op(*raw[0], **raw[1])
    places = [isinstance(p, OnDevice) for p in args[0]] * 3
    return found and [OnDevice(x) if on else x for x, on in zip(found, places, strict=True)]


def _made(make: Any) -> Any:
    def on_device(*args: Any, device: Any = None, pin_memory: Any = None, **options: Any) -> Tensor:
        return OnDevice(make(*args, **options))

    return on_device


def _arrived(x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return OnDevice(_aten._to_copy(x, dtype=dtype))


def _told(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
