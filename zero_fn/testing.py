"""Checks for what users add: the laws that a scheme must obey."""

import math

import torch

from . import tree
from .autodiff import grad_and_value
from .collectives import pmean
from .mesh import Mesh
from .ranks import spmd
from .sharding import Scheme, Sharded, gather_tree, shard, unshard
from .tree import PyTree, Tensor

_SHAPES: dict[str, tuple[int, ...]] = {
    "odd": (7, 5),
    "even": (8, 4),
    "scalar": (),
    "one": (1,),
    "empty": (0, 3),
    "cube": (3, 2, 5),
}


def check_scheme(scheme: Scheme, **axes: int) -> None:
    """Check that a scheme cuts and joins leaves without losing anything.

    In the simulation, and in shapes on abstract ranks, for odd, even, 0-dim, 1-element and empty
    leaves: gather ∘ scatter is the identity, the gradient by the pieces is the dense gradient cut
    the same way, a piece has memory of its own, and all ranks get the same whole.

    Args:
        scheme: the scheme.
        axes: the mesh axes to cut over, with sizes; default: ``dp`` of 1, 2, 3 and 4.

    Raises:
        AssertionError: saying which law fails, for which shape and number of ranks.
    """
    for sizes in [axes] if axes else [{"dp": size} for size in (1, 2, 3, 4)]:
        mesh = Mesh(backend="simulated", **sizes)
        axis = tuple(sizes) if len(sizes) > 1 else next(iter(sizes))
        for name, shape in _SHAPES.items():
            where = f"{scheme!r}: leaf of shape {list(shape)} ({name}) over {sizes}"
            _check_leaf(scheme, mesh, axis, shape, where)


def _check_leaf(
    scheme: Scheme, mesh: Mesh, axis: str | tuple[str, ...], shape: tuple[int, ...], where: str
) -> None:
    generator = torch.Generator().manual_seed(math.prod(shape) + 1)
    leaf = torch.randn(shape, generator=generator, dtype=torch.float64)
    weights = torch.randn(mesh.size, *shape, generator=generator, dtype=torch.float64)

    def cut(x: PyTree) -> PyTree:
        return shard(x, scheme, axis)

    def gradient(piece: PyTree, weight: Tensor) -> PyTree:
        def loss(piece: PyTree) -> Tensor:
            return pmean((unshard(piece).sin() * weight).sum(), axis)

        return grad_and_value(loss)(piece)

    pieces = spmd(cut, mesh)(leaf)
    assert isinstance(pieces, Sharded)
    assert pieces.local.untyped_storage().data_ptr() != leaf.untyped_storage().data_ptr() or not (
        leaf.numel()
    ), f"{where}: scatter returns memory of the leaf itself; copy the piece, x.clone()"
    _equal(gather_tree(pieces, mesh), leaf, f"{where}: gather(scatter(x)) is not x")

    grads, value = spmd(gradient, mesh, data_axes=tuple(mesh.shape))(pieces, weights)
    dense = leaf.cos() * weights.mean(0)
    _equal(value, (leaf.sin() * weights.mean(0)).sum(), f"{where}: ranks gather different wholes")
    _equal(gather_tree(grads, mesh), dense, f"{where}: the gradient is not the dense gradient")

    abstract = spmd(cut, mesh.abstract())(leaf)
    dims = sum(mesh.shape[name] > 1 for name in pieces.axes)
    held = tuple(pieces.local.shape[dims:])
    assert tuple(abstract.local.shape) == held, (
        f"{where}: an abstract rank holds {tuple(abstract.local.shape)}, a simulated one {held}"
    )


def _equal(got: PyTree, want: PyTree, message: str) -> None:
    for x, y in zip(tree.leaves(got), tree.leaves(want), strict=True):
        assert x.shape == y.shape, f"{message}: shape {tuple(x.shape)}, not {tuple(y.shape)}"
        # float64, sums of a few terms
        assert torch.allclose(x, y, rtol=1e-12, atol=1e-12), f"{message}: {x} against {y}"
