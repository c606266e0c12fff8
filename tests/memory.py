"""Measuring memory: the bytes of tensors that are alive, counted by storage."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zero_fn import tree


class Peak(TorchDispatchMode):
    """The most bytes of results that were alive at once, storages counted once.

    What lies in the memory of ``inputs`` does not count.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.inputs = {x.untyped_storage()._cdata for x in inputs}
        self.alive: dict[int, tuple[Any, int]] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree.leaves(out):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                if storage._cdata in self.inputs:
                    continue
                self.alive[storage._cdata] = (
                    torch.multiprocessing.reductions.StorageWeakRef(storage),
                    storage.nbytes(),
                )
        self.alive = {k: (ref, n) for k, (ref, n) in self.alive.items() if not ref.expired()}
        self.most = max(self.most, sum(n for _, n in self.alive.values()))
        return out


def peak(run: Callable[[], Any], inputs: Sequence[Tensor] = ()) -> int:
    """The most bytes that the results of operations took at once while ``run`` ran."""
    with Peak(inputs) as counter:
        run()
    return counter.most
