"""Checks for what users add: the laws that schemes and codecs must obey."""

import math

import torch

from . import tree
from .autodiff import grad_and_value
from .codecs import BLOCK, Codec
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


def check_scheme(scheme: Scheme, *, loses: float = 0.0, **axes: int) -> None:
    """Check that a scheme cuts and joins leaves without losing anything, or no more than it says.

    In the simulation, and in shapes on abstract ranks, for odd, even, 0-dim, 1-element and empty
    leaves: gather ∘ scatter is the identity, the gradient by the pieces is the dense gradient cut
    the same way, a piece has memory of its own, and all ranks get the same whole.

    Args:
        scheme: the scheme.
        loses: the most that gathering may change a value, as a share of the leaf's largest; for
            schemes that gather in few bytes. The gradient is then the dense one at what was
            gathered, and itself loses nothing.
        axes: the mesh axes to cut over, with sizes; default: ``dp`` of 1, 2, 3 and 4.

    Raises:
        AssertionError: saying which law fails, for which shape and number of ranks.
    """
    for sizes in [axes] if axes else [{"dp": size} for size in (1, 2, 3, 4)]:
        mesh = Mesh(backend="simulated", **sizes)
        axis = tuple(sizes) if len(sizes) > 1 else next(iter(sizes))
        for name, shape in _SHAPES.items():
            where = f"{scheme!r}: leaf of shape {list(shape)} ({name}) over {sizes}"
            _check_leaf(scheme, mesh, axis, shape, loses, where)


def _check_leaf(
    scheme: Scheme,
    mesh: Mesh,
    axis: str | tuple[str, ...],
    shape: tuple[int, ...],
    loses: float,
    where: str,
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
    whole = gather_tree(pieces, mesh)
    if loses:
        lost, most = (x.abs().max().item() if x.numel() else 0.0 for x in (whole - leaf, leaf))
        assert lost <= loses * most * (1 + 1e-6), (  # scales may be float32
            f"{where}: gather(scatter(x)) is {lost} off, more than {loses} of {most}"
        )
    else:
        _equal(whole, leaf, f"{where}: gather(scatter(x)) is not x")

    grads, value = spmd(gradient, mesh, data_axes=tuple(mesh.shape))(pieces, weights)
    dense = whole.cos() * weights.mean(0)
    _equal(value, (whole.sin() * weights.mean(0)).sum(), f"{where}: ranks gather different wholes")
    message = f"{where}: the gradient is not the dense gradient"
    if loses:  # as pieces, since gathering them would lose again
        _equal(grads.local, spmd(cut, mesh)(dense).local, message)
    else:
        _equal(gather_tree(grads, mesh), dense, message)

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


def check_codec(codec: Codec) -> None:
    """Check the laws that error feedback and transport need of a codec.

    For several rows, sizes and magnitudes, in float32 and float64: decoding gives the same shape
    and dtype, and the same numbers twice; a row's code depends on that row alone, and has one
    length; what a code loses is not larger than what was there; zeros decode to finite numbers no
    larger than 1e-6; NaN and infinity are not hidden; all of it under ``vmap``.

    Raises:
        AssertionError: saying which law fails, for which rows.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64):
        for rows, n in ((1, BLOCK), (3, BLOCK), (2, 4 * BLOCK)):
            for scale in (1e-3, 1.0, 1e3):
                x = torch.randn(rows, n, generator=generator, dtype=dtype) * scale
                x[..., ::7] *= 10
                _check_rows(codec, x, f"{codec!r} on {[rows, n]} of {dtype}, scale {scale}")
        zeros = torch.zeros(2, BLOCK, dtype=dtype)
        found = codec.decode(codec.encode(zeros), BLOCK, dtype)
        assert (found.abs() <= 1e-6).all(), f"{codec!r}: zeros decode to {found.abs().max()}"
        for bad in (math.nan, math.inf, -math.inf):
            x = torch.randn(2, BLOCK, generator=generator, dtype=dtype)
            x[1, 17] = bad
            found = codec.decode(codec.encode(x), BLOCK, dtype)
            assert found[0].isfinite().all(), f"{codec!r}: {bad} in row 1 shows in row 0"
            assert not found[1].isfinite().all(), (
                f"{codec!r}: {bad} decodes to finite numbers, so that no rank would know of it; "
                "let NaN and infinity through"
            )


def _check_rows(codec: Codec, x: Tensor, where: str) -> None:
    n = x.shape[-1]
    payload = tuple(codec.encode(x))
    found = codec.decode(payload, n, x.dtype)
    assert found.shape == x.shape, f"{where}: decodes to shape {tuple(found.shape)}"
    assert found.dtype == x.dtype, f"{where}: decodes to {found.dtype}"
    assert all(part.shape[0] == x.shape[0] for part in payload), (
        f"{where}: encodes to shapes {[tuple(part.shape) for part in payload]}; dimension 0 of "
        "each is the rows"
    )
    assert torch.equal(found, codec.decode(payload, n, x.dtype)), f"{where}: decodes by chance"
    lost = (x - found).norm(dim=-1)
    assert (lost <= x.norm(dim=-1)).all(), (
        f"{where}: loses more than there was, {lost.max()} of {x.norm(dim=-1).max()}, so that "
        "feedback would grow without end; scale what decode returns"
    )
    alone = [codec.decode(codec.encode(row.unsqueeze(0)), n, x.dtype)[0] for row in x]
    assert torch.equal(found, torch.stack(alone)), f"{where}: rows depend on one another"

    def through(row: Tensor) -> Tensor:
        return codec.decode(tuple(codec.encode(row.unsqueeze(0))), n, x.dtype)[0]

    assert torch.equal(found, torch.func.vmap(through)(x)), f"{where}: differs under vmap"
