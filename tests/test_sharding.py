"""Pieces: how many values a rank holds, what shapes work, what stays tied, and what is refused."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.sharding import STAGES, Tied
from zero_fn.testing import check_scheme

from .processes import run_on_processes
from .test_training import mlp


def cut(params: Any, stage: int, **sizes: int) -> Any:
    mesh = zf.Mesh(**sizes)
    axis = tuple(sizes) if len(sizes) > 1 else "dp"
    return zf.spmd(lambda p: zf.shard(p, stage, axis), mesh)(params), mesh


@dataclass(frozen=True)
class Strided(zf.Scheme):
    """A user's scheme: rank r holds the values r, r + n, r + 2n, ..."""

    def scatter(self, x: Tensor, axis: Any) -> Tensor:
        n = zf.axis_size(axis)
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % n))
        return zf.pscatter(flat.view(-1, n).T.reshape(-1), axis)

    def gather(self, piece: Tensor, shape: Any, axis: Any) -> Tensor:
        flat = zf.all_gather(piece, axis).view(zf.axis_size(axis), -1).T.reshape(-1)
        return flat[: torch.Size(shape).numel()].view(shape)


@dataclass(frozen=True)
class Hierarchical(zf.Scheme):
    """A user's scheme: cut over the inner axes, whole groups replicated over the first."""

    def axes(self, axis: Any) -> tuple[str, ...]:
        return tuple(axis[1:])

    def scatter(self, x: Tensor, axis: Any) -> Tensor:
        inner = axis[1:]
        flat = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % zf.axis_size(inner)))
        return zf.pscatter(flat, inner)

    def gather(self, piece: Tensor, shape: Any, axis: Any) -> Tensor:
        flat = zf.all_gather(zf.pvary(piece, axis[:1]), axis[1:])
        return flat[: torch.Size(shape).numel()].view(shape)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_holds_its_share_and_no_more(stage: int, ranks: int) -> None:
    mesh = zf.Mesh(dp=ranks)
    optimizer = zf.adamw(1e-3)

    def init(params: Any) -> zf.TrainState:
        params = zf.shard(params, stage)
        return zf.TrainState(params, optimizer.init(params))

    params = mlp()
    state = zf.spmd(init, mesh)(params)
    for held in (state.params, state.opt_state.mu, state.opt_state.nu):
        for piece, leaf in zip(tree.leaves(held), tree.leaves(params), strict=True):
            share = -(-leaf.numel() // ranks)
            assert piece.shape == ((ranks, share) if ranks > 1 else (share,))
            assert piece.untyped_storage().nbytes() == ranks * share * 4


def held_by_a_process(stage: int) -> list[tuple[int, int]]:
    pieces, _ = cut(mlp(), stage, dp=2)
    return [(x.numel(), x.untyped_storage().nbytes()) for x in tree.leaves(pieces)]


def test_a_process_holds_its_share_and_no_more() -> None:
    share = [-(-leaf.numel() // 2) for leaf in tree.leaves(mlp())]
    for rank in run_on_processes(2, held_by_a_process, 3):
        assert rank == [(n, 4 * n) for n in share]


@pytest.mark.parametrize("scheme", [*STAGES, Strided()], ids=repr)
def test_schemes_obey_the_laws(scheme: zf.Scheme) -> None:
    check_scheme(scheme)
    check_scheme(scheme, dp_outer=2, dp_inner=3)


def test_a_hierarchical_scheme_obeys_the_laws() -> None:
    check_scheme(Hierarchical(), dp_outer=2, dp_inner=3)


def test_the_laws_refuse_a_lossy_scheme() -> None:
    @dataclass(frozen=True)
    class Lossy(Strided):
        def gather(self, piece: Tensor, shape: Any, axis: Any) -> Tensor:
            return super().gather(piece, shape, axis).round(decimals=2)

    with pytest.raises(AssertionError, match=r"Lossy\(\): leaf of shape .* is not x"):
        check_scheme(Lossy())


class Int8Gather(torch.autograd.Function):
    """A gather in int8, whose gradient is reduced as it is, times a factor that is 1 if right."""

    generate_vmap_rule = True

    @staticmethod
    def forward(piece: Tensor, axis: Any, factor: float) -> Tensor:
        codec, n = zf.Int8(), piece.numel()
        row = torch.nn.functional.pad(piece, (0, -n % 1024)).view(1, -1)
        codes, scales = (zf.all_gather(part, axis) for part in codec.encode(row))
        return codec.decode((codes, scales), row.shape[-1], piece.dtype)[:, :n].reshape(-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.axis, ctx.factor = inputs[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.factor * zf.psum_scatter(grad.contiguous(), ctx.axis), None, None


@dataclass(frozen=True)
class Quantised(zf.sharding.ZeRO3):
    factor: float = 1.0

    def gather(self, piece: Tensor, shape: Any, axis: Any) -> Tensor:
        flat = Int8Gather.apply(piece, axis, self.factor)
        return flat[: torch.Size(shape).numel()].view(shape)  # type: ignore[no-any-return]


def test_a_scheme_may_lose_what_it_says_and_no_more() -> None:
    check_scheme(Quantised(), loses=1 / 254)  # half of one of 127 steps
    check_scheme(Quantised(), loses=1 / 254, dp_outer=2, dp_inner=2)
    with pytest.raises(AssertionError, match=r"off, more than 0.001 of"):
        check_scheme(Quantised(), loses=1e-3)
    with pytest.raises(AssertionError, match="gradient is not the dense gradient"):
        check_scheme(Quantised(0.999), loses=1 / 254)


def test_the_laws_refuse_a_gradient_that_is_not_reduced() -> None:
    @dataclass(frozen=True)
    class Unreduced(Hierarchical):
        def gather(self, piece: Tensor, shape: Any, axis: Any) -> Tensor:
            return zf.all_gather(piece, axis[1:])[: torch.Size(shape).numel()].view(shape)

    with pytest.raises(ValueError, match="varies over axis 'dp_outer'"):
        check_scheme(Unreduced(), dp_outer=2, dp_inner=3)


leaves = st.builds(
    lambda shape, wide: torch.randn(shape, dtype=torch.float64 if wide else torch.float32),
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.booleans(),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    ),
    max_leaves=6,
)
meshes = st.one_of(
    st.fixed_dictionaries({"dp": st.integers(1, 5)}),
    st.fixed_dictionaries({"dp_a": st.integers(1, 3), "dp_b": st.integers(1, 3)}),
)


@settings(max_examples=40, deadline=None)
@given(params=trees, sizes=meshes, stage=st.integers(0, 3))
def test_unshard_undoes_shard(params: Any, sizes: dict[str, int], stage: int) -> None:
    pieces, mesh = cut(params, stage, **sizes)
    whole = zf.gather_tree(pieces, mesh)
    assert tree.flatten(whole)[1] == tree.flatten(params)[1]
    for got, want in zip(tree.leaves(whole), tree.leaves(params), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@settings(max_examples=25, deadline=None)
@given(params=trees, sizes=meshes, stage=st.integers(0, 3))
def test_gradients_are_the_dense_ones(params: Any, sizes: dict[str, int], stage: int) -> None:
    pieces, mesh = cut(params, stage, **sizes)
    axis = tuple(sizes) if len(sizes) > 1 else "dp"
    rows = torch.randn(mesh.size * 2, dtype=torch.float64)

    def loss(params: Any, rows: Tensor) -> Tensor:
        terms = [(leaf.sin().sum() * rows).mean() for leaf in tree.leaves(params)]
        return torch.stack([rows.mean(), *terms]).sum()

    def gradient(pieces: Any, rows: Tensor) -> Any:
        return zf.grad(lambda p: zf.pmean(loss(zf.unshard(p), rows), axis))(pieces)

    got = zf.gather_tree(zf.spmd(gradient, mesh)(pieces, rows), mesh)
    want = zf.grad(loss)(params, rows)
    # float32 leaves: sums of up to 50 terms
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_tied_weights_stay_one_piece(stage: int) -> None:
    w = torch.randn(5, 3)
    params = {"embed": w, "mid": torch.randn(3, 3), "head": w}
    x = torch.randn(8, 5)

    def loss(p: Any, x: Tensor) -> Tensor:
        return (torch.tanh(x @ p["embed"] @ p["mid"]) @ p["head"].T).square().mean()

    def step(p: Any, x: Tensor) -> Any:
        grads = zf.grad(lambda p: zf.pmean(loss(zf.unshard(p), x), "dp"))(p)
        return tree.map(lambda p, g: p - 0.1 * g, p, grads)

    pieces, mesh = cut(params, stage, dp=2)
    assert isinstance(pieces["head"], Tied)
    assert len(tree.leaves(pieces)) == 2
    stepped = zf.spmd(step, mesh)(pieces, x)
    got = zf.gather_tree(stepped, mesh)
    assert torch.equal(got["embed"], got["head"])

    w_, mid = w.clone().requires_grad_(), params["mid"].clone().requires_grad_()
    loss({"embed": w_, "mid": mid, "head": w_}, x).backward()
    assert w_.grad is not None
    torch.testing.assert_close(got["embed"], w - 0.1 * w_.grad)


def test_a_tie_whose_partner_is_elsewhere_is_an_error() -> None:
    w = torch.randn(4)
    pieces, mesh = cut({"a": w, "b": w}, 3, dp=2)
    with pytest.raises(ValueError, match="'b' is tied to 'a', which is not in this tree"):
        zf.gather_tree({"b": pieces["b"]}, mesh)


def test_the_cast_comes_before_the_gather() -> None:
    """Half the bytes on the wire."""
    mesh = zf.Mesh(dp=4).abstract()
    pieces = zf.spmd(lambda p: zf.shard(p, 3), mesh)(mlp())

    def moved(dtype: Any) -> int:
        whole = zf.jit(zf.spmd(lambda p: zf.unshard(p, dtype), mesh))
        (gathers,) = whole.trace(pieces).collectives()
        return gathers.bytes_in

    assert moved(torch.bfloat16) * 2 == moved(None)

    real, simulated = cut(mlp(), 3, dp=4)
    total = zf.spmd(lambda p: zf.unshard(p, torch.bfloat16)["out"].float().sum(), simulated)(real)
    torch.testing.assert_close(total, mlp()["out"].bfloat16().float().sum())


def test_repr_says_what_a_piece_is() -> None:
    pieces, _ = cut({"w": torch.randn(6, 4), "b": torch.randn(3, dtype=torch.bfloat16)}, 3, dp=4)
    assert repr(pieces) == "{'w': f32[6,4] as 1/4 of dp, 'b': bf16[3] as 1/4 of dp}"
    whole, _ = cut(torch.randn(2), 0, dp=4)
    assert repr(whole) == "f32[2] whole on each of dp"


@pytest.mark.parametrize(
    ("params", "stage", "error", "message"),
    [
        ({"a": [torch.arange(3)]}, 1, TypeError, r"params at 'a.0': .* dtype torch.int64"),
        ({"a": {"b": "text"}}, 1, TypeError, r"params at 'a.b': expected a tensor, got 'text'"),
        ({"a": 3.5}, 1, TypeError, r"params at 'a': expected a tensor, got 3.5"),
        (torch.randn(3), 4, ValueError, r"stage is 4; it is 0, 1, 2, 3, or a Scheme"),
        (torch.randn(3), True, ValueError, r"stage is True"),
        (torch.randn(3), "3", ValueError, r"stage is '3'"),
    ],
)
def test_bad_params_and_stages_are_refused(
    params: Any, stage: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cut(params, stage, dp=2)


def test_sharding_twice_is_refused() -> None:
    pieces, mesh = cut({"w": torch.randn(4)}, 1, dp=2)
    with pytest.raises(ValueError, match="params at 'w' is sharded already"):
        zf.spmd(lambda p: zf.shard(p, 1), mesh)(pieces)


def test_outside_spmd_is_refused() -> None:
    with pytest.raises(NameError, match=r"unknown mesh axis 'dp'; no axis is bound here"):
        zf.shard(torch.randn(3), 1)


@pytest.mark.parametrize(("made", "used"), [(1, 2), (4, 2), (2, 1)])
def test_another_mesh_is_refused(made: int, used: int) -> None:
    pieces, _ = cut({"w": torch.randn(8)}, 1, dp=made)
    with pytest.raises(ValueError, match=r"cut on another mesh|was cut for"):
        zf.gather_tree(pieces, zf.Mesh(dp=used))


def test_a_mesh_without_the_axis_is_refused() -> None:
    pieces, _ = cut({"w": torch.randn(8)}, 1, dp=2)
    with pytest.raises(ValueError, match=r"state at 'w' is cut over axis 'dp', .* \['tp'\]"):
        zf.gather_tree(pieces, zf.Mesh(tp=2))
