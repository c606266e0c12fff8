"""The parameters of the stages that live here: each leaf once, whatever stages use it.

A leaf is gathered and its gradient reduced as its scheme says (see ``accumulation``). The same
tensor in two stages, or a leaf that ``zf.shard`` has tied to another stage's, is one leaf: its
gradient is the sum over all the places where it stands.
"""

from collections.abc import Mapping
from typing import Any

import torch

from .. import tree
from ..accumulation import AccumulatedLeaf
from ..sharding import Sharded, Tied, is_piece
from ..slicing import local_slices
from ..tree import PyTree, Tensor
from .split import Sum
from .staging import without_copies

# In which the stages see parameters, and in which gradients are summed over ranks; None: their own.
Dtypes = tuple[torch.dtype | None, torch.dtype | None]
OWN: Dtypes = (None, None)


class StageParams:
    """The parameters of one stage.

    Attributes:
        tensors: what the stage's programs take: of each leaf the whole tensor, or its piece where
            it is gathered at each use.
        key: what a program depends on besides the tensors' shapes; hashable.
    """

    def __init__(self, nodes: list[Any], treedef: tree.TreeDef, uses: list[AccumulatedLeaf]):
        self.nodes, self.treedef, self.uses = nodes, treedef, uses
        self.leaves = list({id(leaf): leaf for leaf in uses}.values())
        places = {id(leaf): place for place, leaf in enumerate(self.leaves)}
        self.slots = [places[id(leaf)] for leaf in uses]
        self.tensors: list[Tensor] = [_local(leaf.value) for leaf in self.leaves]
        cuts = tuple(x.value.cut if isinstance(x.value, Sharded) else None for x in self.leaves)
        dtypes = tuple(leaf.dtypes for leaf in self.leaves)
        self.key = (treedef, tuple(self.slots), cuts, dtypes)

    @staticmethod
    def of_stages(trees: Mapping[int, PyTree], dtypes: Dtypes = OWN) -> "dict[int, StageParams]":
        """The parameters of stages, by stage; leaves that two of them share are shared.

        Raises:
            TypeError: for a leaf that is no floating-point tensor, with its key path.
            ValueError: for a tied leaf whose partner is in none of the stages.
        """
        same: dict[int, AccumulatedLeaf] = {}
        named: dict[str, AccumulatedLeaf] = {}
        flat: dict[int, tuple[list[Any], tree.TreeDef, list[str]]] = {}
        for stage, params in trees.items():
            tree.check_tensors(params, f"the params of stage {stage}", floating=True)
            nodes, treedef = tree.flatten(params, is_piece)
            paths = [tree.join_path(str(stage), path) for path in tree.paths(params, is_piece)]
            flat[stage] = nodes, treedef, paths
            for path, node in zip(paths, nodes, strict=True):
                if not isinstance(node, Tied):
                    tensor = _local(node)
                    if id(tensor) not in same:
                        same[id(tensor)] = AccumulatedLeaf(node, *dtypes)
                    named[path] = same[id(tensor)]
        found = {}
        for stage, (nodes, treedef, paths) in flat.items():
            uses = []
            for path, node in zip(paths, nodes, strict=True):
                # tied within all stages' tree, or within the stage's own
                names = [node.to, f"{stage}.{node.to}"] if isinstance(node, Tied) else [path]
                known = [named[name] for name in names if name in named]
                if not known:
                    raise ValueError(
                        f"the params of the stages: {path!r} is tied to {node.to!r}, which is "
                        f"in no stage here; there are {list(named)}"
                    )
                uses.append(known[0])
            found[stage] = StageParams(nodes, treedef, uses)
        return found

    def whole(self, tensors: list[Tensor]) -> PyTree:
        """What the stage is given, from ``tensors`` in place of its own."""
        values = [
            leaf.use(leaf.value.like(x) if isinstance(leaf.value, Sharded) else x)
            for leaf, x in zip(self.leaves, tensors, strict=True)
        ]
        given = tree.unflatten(self.treedef, [values[slot] for slot in self.slots])
        return local_slices(without_copies(given))

    def sums(self) -> list[Sum]:
        """What gradients by ``tensors`` are added to where they are made."""
        return [
            Sum(None, False)
            if leaf.sum is None or (leaf.early and leaf.each)
            else Sum(_local(leaf.sum), leaf.own)
            for leaf in self.leaves
        ]

    def add(self, grads: list[Tensor], owned: list[bool] | None, *, in_place: bool) -> None:
        """Take one micro-batch's gradients by ``tensors``, or the sums with them.

        Args:
            grads: the gradients, added to :meth:`sums` where there are any; is emptied.
            owned: for each gradient whether its memory is nobody else's; None: nobody knows.
            in_place: whether to write into memory.
        """
        sums = self.sums()
        for place, leaf in reversed([*enumerate(self.leaves)]):
            g: Any = grads.pop()
            g = leaf.value.like(g) if isinstance(leaf.value, Sharded) else g
            if sums[place].total is None:
                leaf.add(g, own=owned is not None and owned[place], in_place=in_place)
            else:
                leaf.sum, leaf.own = g, in_place

    def gradient(self) -> PyTree:
        """The tree of the gradients; a tied leaf stays the node that it is."""
        leaves = [
            node if isinstance(node, Tied) else leaf.gradient()
            for node, leaf in zip(self.nodes, self.uses, strict=True)
        ]
        return tree.unflatten(self.treedef, leaves)


def _local(node: Any) -> Tensor:
    return node.local if isinstance(node, Sharded) else node
