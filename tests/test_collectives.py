"""The laws of the collectives, against a reference on lists of blocks, one a rank.

``ROWS`` is the table: a new collective is a new row. The references are the definition: what each
rank of a line of ranks holds afterwards, given what each holds before.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import zero_fn as zf

from .processes import run_on_processes

Blocks = list[Tensor]

# The references.


def ref_psum(blocks: Blocks) -> Blocks:
    return [torch.stack(blocks).sum(0).to(blocks[0].dtype) for _ in blocks]


def ref_pmean(blocks: Blocks) -> Blocks:
    return [torch.stack(blocks).mean(0) for _ in blocks]


def ref_pvary(blocks: Blocks) -> Blocks:
    return [block.clone() for block in blocks]


def ref_all_gather(dim: int) -> Callable[[Blocks], Blocks]:
    return lambda blocks: [torch.cat(blocks, dim) for _ in blocks]


def ref_psum_scatter(dim: int) -> Callable[[Blocks], Blocks]:
    return lambda blocks: list(ref_psum(blocks)[0].chunk(len(blocks), dim))


def ref_pscatter(dim: int) -> Callable[[Blocks], Blocks]:
    return lambda blocks: [block.chunk(len(blocks), dim)[rank] for rank, block in enumerate(blocks)]


def ref_ppermute(pairs: Callable[[int], list[tuple[int, int]]]) -> Callable[[Blocks], Blocks]:
    def reference(blocks: Blocks) -> Blocks:
        received = [torch.zeros_like(block) for block in blocks]
        for source, target in pairs(len(blocks)):
            received[target] = blocks[source]
        return received

    return reference


def ref_all_to_all(split: int, concat: int) -> Callable[[Blocks], Blocks]:
    def reference(blocks: Blocks) -> Blocks:
        n = len(blocks)
        return [torch.cat([b.chunk(n, split)[rank] for b in blocks], concat) for rank in range(n)]

    return reference


def ring(n: int) -> list[tuple[int, int]]:
    return [(rank, (rank + 1) % n) for rank in range(n)]


def one_way(n: int) -> list[tuple[int, int]]:
    return [(rank, rank + 1) for rank in range(n - 1)]


@dataclass(frozen=True)
class Row:
    """A collective: how it is called, its reference, and whether it takes and gives varying."""

    call: Callable[[Tensor, Any], Tensor]
    reference: Callable[[Blocks], Blocks]
    takes_varying: bool
    gives_varying: bool
    several: bool = True  # whether it works over several axes at once


def _permuted(pairs: Callable[[int], list[tuple[int, int]]]) -> Callable[[Tensor, Any], Tensor]:
    return lambda x, axis: zf.ppermute(x, axis, pairs(zf.axis_size(axis)))


ROWS: dict[str, Row] = {
    "psum": Row(zf.psum, ref_psum, True, False),
    "pmean": Row(zf.pmean, ref_pmean, True, False),
    "pvary": Row(zf.pvary, ref_pvary, False, True),
    "all_gather": Row(zf.all_gather, ref_all_gather(0), True, True),
    "all_gather 1": Row(lambda x, a: zf.all_gather(x, a, 1), ref_all_gather(1), True, True),
    "all_gather -1": Row(lambda x, a: zf.all_gather(x, a, -1), ref_all_gather(-1), True, True),
    "psum_scatter": Row(zf.psum_scatter, ref_psum_scatter(0), True, True),
    "psum_scatter 1": Row(lambda x, a: zf.psum_scatter(x, a, 1), ref_psum_scatter(1), True, True),
    "all_gather_invariant": Row(zf.all_gather_invariant, ref_all_gather(0), True, False),
    "all_gather_invariant 1": Row(
        lambda x, a: zf.all_gather_invariant(x, a, 1), ref_all_gather(1), True, False
    ),
    "pscatter": Row(zf.pscatter, ref_pscatter(0), False, True),
    "pscatter -1": Row(lambda x, a: zf.pscatter(x, a, -1), ref_pscatter(-1), False, True),
    "ppermute": Row(_permuted(ring), ref_ppermute(ring), True, True, False),
    "ppermute one way": Row(_permuted(one_way), ref_ppermute(one_way), True, True, False),
    "all_to_all": Row(zf.all_to_all, ref_all_to_all(0, 0), True, True, False),
    "all_to_all 0 1": Row(
        lambda x, a: zf.all_to_all(x, a, 0, 1), ref_all_to_all(0, 1), True, True, False
    ),
    "all_to_all 1 0": Row(
        lambda x, a: zf.all_to_all(x, a, 1, 0), ref_all_to_all(1, 0), True, True, False
    ),
}

# Running a rank's program, and its reference, on all ranks of a mesh.

SHAPE = (12, 6)  # each dimension divisible by 2, 3 and 6
MESHES: list[tuple[dict[str, int], Any]] = [
    ({"a": 2}, "a"),
    ({"a": 3}, "a"),
    ({"a": 1}, "a"),
    ({"a": 2, "b": 3}, "a"),
    ({"a": 2, "b": 3}, "b"),
    ({"a": 2, "b": 3}, ("a", "b")),
    ({"a": 3, "b": 1}, ("a", "b")),
]
MESH_IDS = ["2", "3", "1", "2x3 over a", "2x3 over b", "2x3 over both", "3x1 over both"]


def lines(sizes: dict[str, int], axis: Any) -> list[list[int]]:
    """The lines of ranks along an axis, or along several, in row-major order."""
    names = list(sizes)
    along = [axis] if isinstance(axis, str) else list(axis)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*[range(size) for size in sizes.values()])):
        across = tuple(i for name, i in zip(names, place, strict=True) if name not in along)
        found.setdefault(across, []).append(rank)
    return list(found.values())


def inputs(
    row: Row, sizes: dict[str, int], axis: Any, dtype: torch.dtype = torch.float64
) -> Tensor:
    """The ranks' blocks, stacked; along a line they are equal if the collective wants that."""
    count = torch.Size(sizes.values()).numel()
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, *SHAPE, generator=generator, dtype=torch.float64)
    if not row.takes_varying:
        for line in lines(sizes, axis):
            x[line] = x[line[0]].clone()
    return (x * 8).to(dtype)


def everywhere(sizes: dict[str, int], f: Callable[[Tensor], Any], axis: Any, varying: bool) -> Any:
    """A function of the stacked blocks that runs ``f`` on each rank and stacks what it returns."""
    mesh = zf.Mesh(**sizes)
    names = tuple(sizes)
    along = (axis,) if isinstance(axis, str) else axis

    def program(x: Tensor) -> Tensor:
        # A rank reads its block by its place. An input that is invariant over an axis is read by
        # its place along the others only.
        index = torch.zeros((), dtype=torch.int64)
        for name in names:
            place = zf.axis_index(name) if varying or name not in along else 0
            index = index * sizes[name] + place
        out = f(x.index_select(0, index.reshape(1)).squeeze(0))
        return zf.all_gather(out.unsqueeze(0), names)

    return zf.spmd(program, mesh, batch="replicated", data_axes=()), program


def on_all_ranks(
    sizes: dict[str, int], f: Callable[[Tensor], Tensor], axis: Any, varying: bool, x: Tensor
) -> Tensor:
    """What ``f`` returns on each rank, stacked."""
    run, _ = everywhere(sizes, f, axis, varying)
    out: Tensor = run(x)
    return out


def reference(row: Row, sizes: dict[str, int], axis: Any, x: Tensor) -> Tensor:
    out: list[Any] = [None] * len(x)
    for line in lines(sizes, axis):
        for rank, block in zip(line, row.reference([x[r] for r in line]), strict=True):
            out[rank] = block
    return torch.stack(out)


CASES = [
    pytest.param(name, sizes, axis, id=f"{name}, {label}")
    for name, row in ROWS.items()
    for (sizes, axis), label in zip(MESHES, MESH_IDS, strict=True)
    if row.several or isinstance(axis, str)
]


# Derivatives take longer: meshes where every branch is met once.
FEW = [case for case in CASES if str(case.id).endswith((", 3", ", 1", "over b", "over both"))]


@pytest.mark.parametrize(("name", "sizes", "axis"), CASES)
def test_values_are_the_reference(name: str, sizes: dict[str, int], axis: Any) -> None:
    row = ROWS[name]
    x = inputs(row, sizes, axis)
    got = on_all_ranks(sizes, lambda b: row.call(b, axis), axis, row.takes_varying, x)
    torch.testing.assert_close(got, reference(row, sizes, axis, x))


# Derivatives: the ranks' program computes a scalar of what the collective gives, and its gradient.
# The scalar adds over the axis if the ranks hold different values, and counts once if they do not.


def total(value: Tensor, axis: Any, varying: bool) -> Tensor:
    return zf.psum(value, axis) if varying else value


def scalar(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: total(row.call(x, axis).sin().sum(), axis, row.gives_varying)


def first(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    return zf.grad(scalar(row, axis))


def second(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    def norm(x: Tensor) -> Tensor:
        return total(first(row, axis)(x).square().sum(), axis, row.takes_varying)

    return zf.grad(norm)


def mapped(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    """vmap(grad) over a batch of three, mapped along dimension 1."""
    return lambda x: torch.func.vmap(first(row, axis), 1, 1)(torch.stack([x, 2 * x, -x], 1))


def of_map(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    """grad(vmap) over a batch of two."""
    f = torch.func.vmap(scalar(row, axis))
    return zf.grad(lambda x: f(torch.stack([x, 3 * x])).sum())


def outermost(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    """jvp(grad): a Hessian-vector product."""
    return lambda x: torch.func.jvp(first(row, axis), (x,), (x.cos(),))[1]


def twice(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    """jvp(jvp), whose inner tangent depends on x."""

    def once(x: Tensor) -> Tensor:
        return forward(row, axis)(x)

    return lambda x: torch.func.jvp(once, (x,), (x.cos(),))[1]


def forward(row: Row, axis: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.func.jvp(lambda x: row.call(x, axis).sin(), (x,), (x.cos(),))[1]


def reference_derivatives(row: Row, sizes: dict[str, int], axis: Any, x: Tensor) -> dict[str, Any]:
    """The same by plain autograd through the reference."""
    groups = lines(sizes, axis)

    def outputs(x: Tensor) -> Tensor:
        return reference(row, sizes, axis, x)

    def whole(x: Tensor) -> Tensor:
        out = outputs(x).sin().flatten(1).sum(1)
        return torch.stack([out[g].sum() if row.gives_varying else out[g[0]] for g in groups]).sum()

    def tied(g: Tensor) -> Tensor:
        """Blocks that are one value have one gradient, the sum of theirs."""
        if row.takes_varying:
            return g
        g = g.clone()
        for line in groups:
            g[line] = g[line].sum(0)
        return g

    def gradient(x: Tensor) -> Tensor:
        return tied(torch.func.grad(whole)(x))

    def norm(x: Tensor) -> Tensor:
        squares = gradient(x).square().flatten(1).sum(1)
        picked = [squares[g].sum() if row.takes_varying else squares[g[0]] for g in groups]
        return torch.stack(picked).sum()

    def pushed(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: outputs(x).sin(), (x,), (x.cos(),))[1]

    return {
        "outermost": torch.func.jvp(gradient, (x,), (x.cos(),))[1],
        "twice": torch.func.jvp(pushed, (x,), (x.cos(),))[1],
        "first": gradient(x),
        "second": tied(torch.func.grad(norm)(x)),
        "mapped": torch.stack([gradient(x), gradient(2 * x), gradient(-x)], 2),
        "of_map": gradient(x) + 3 * gradient(3 * x),
        "forward": pushed(x),
    }


DERIVED = {
    "first": first,
    "second": second,
    "mapped": mapped,
    "of_map": of_map,
    "forward": forward,
    "outermost": outermost,
    "twice": twice,
}


@pytest.mark.parametrize(("name", "sizes", "axis"), FEW)
def test_derivatives_are_the_references(name: str, sizes: dict[str, int], axis: Any) -> None:
    row = ROWS[name]
    x = inputs(row, sizes, axis) / 8
    want = reference_derivatives(row, sizes, axis, x)
    for kind, derive in DERIVED.items():
        got = on_all_ranks(sizes, derive(row, axis), axis, row.takes_varying, x)
        torch.testing.assert_close(got, want[kind], msg=lambda m, k=kind: f"{k}: {m}")


@pytest.mark.parametrize(("name", "sizes", "axis"), CASES)
def test_the_adjoint_law(name: str, sizes: dict[str, int], axis: Any) -> None:
    """⟨f x, y⟩ = ⟨x, fᵀ y⟩, where a value that a line of ranks shares counts once."""
    row = ROWS[name]
    x = inputs(row, sizes, axis)

    def products(x: Tensor) -> Tensor:
        out, pullback = torch.func.vjp(lambda x: row.call(x, axis), x)[:2]
        y = torch.linspace(-1, 2, out.numel(), dtype=x.dtype).reshape(out.shape)
        if row.gives_varying:
            y = y * (zf.axis_index(axis) + 1)
        (back,) = pullback(y)
        return torch.stack([(out * y).sum(), (x * back).sum()])

    got = on_all_ranks(sizes, products, axis, row.takes_varying, x)
    size = len(lines(sizes, axis)[0])
    left, right = got.sum(0)
    left = left if row.gives_varying else left / size
    right = right if row.takes_varying else right / size
    torch.testing.assert_close(left, right)


# Contexts around the whole program.


def derived_program(name: str, kind: str) -> tuple[Any, Tensor, Tensor]:
    row, sizes, axis = ROWS[name], {"a": 2}, "a"
    x = inputs(row, sizes, axis) / 8
    run, _ = everywhere(sizes, DERIVED[kind](row, axis), axis, row.takes_varying)
    return run, x, reference_derivatives(row, sizes, axis, x)[kind]


@pytest.mark.parametrize("name", ROWS)
def test_a_sweep_around_the_ranks(name: str) -> None:
    run, x, want = derived_program(name, "first")
    got = torch.func.vmap(lambda k: run(x * k))(torch.tensor([1.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(got, torch.stack([want, want]))


@pytest.mark.parametrize("name", ROWS)
def test_derivatives_around_the_ranks(name: str) -> None:
    """The simulation as a whole is an ordinary function of the stacked blocks."""
    row, sizes, axis = ROWS[name], {"a": 3}, "a"
    x = inputs(row, sizes, axis) / 8
    run, _ = everywhere(sizes, lambda b: row.call(b, axis), axis, row.takes_varying)
    f = lambda x: run(x).sin().sum()  # noqa: E731
    g = lambda x: reference(row, sizes, axis, x).sin().sum()  # noqa: E731
    ours, theirs = torch.func.grad(f)(x), torch.func.grad(g)(x)
    if not row.takes_varying:  # ours reads the one value at one place
        ours, theirs = ours.sum(0), theirs.sum(0)
    torch.testing.assert_close(ours, theirs)


def every_row(kind: str, names: Sequence[str]) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """One program of all the rows, since what is slow is to trace one, with what it should give."""
    sizes, axis = {"a": 2}, "a"
    x = inputs(ROWS["psum"], sizes, axis) / 8

    def program(x: Tensor) -> dict[str, Tensor]:
        own = x.index_select(0, zf.axis_index(axis).reshape(1)).squeeze(0)
        given = {name: own if ROWS[name].takes_varying else x[0] for name in names}
        found = {name: DERIVED[kind](ROWS[name], axis)(block) for name, block in given.items()}
        return {name: zf.all_gather(out.unsqueeze(0), axis) for name, out in found.items()}

    want = {
        name: reference_derivatives(ROWS[name], sizes, axis, inputs(ROWS[name], sizes, axis) / 8)[
            kind
        ]
        for name in names
    }
    return zf.spmd(program, zf.Mesh(**sizes), batch="replicated", data_axes=()), x, want


# Not "twice": under make_fx torch's forward mode fails an assertion of its own, loudly.
@pytest.mark.parametrize("kind", [kind for kind in DERIVED if kind != "twice"])
def test_traces(kind: str) -> None:
    run, x, want = every_row(kind, list(ROWS))
    torch.testing.assert_close(make_fx(run, tracing_mode="fake")(x)(x), want)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("eager", "second"),
        ("aot_eager", "mapped"),
        ("aot_eager", "forward"),
    ],
)
def test_compiles(backend: str, kind: str) -> None:
    torch._dynamo.reset()
    run, x, want = every_row(kind, list(ROWS))
    got = torch.compile(run, fullgraph=True, backend=backend)(x)
    torch.testing.assert_close(got, want)


def test_compiles_with_inductor() -> None:
    torch._dynamo.reset()
    run, x, want = every_row("first", ["all_gather 1", "psum_scatter"])
    torch.testing.assert_close(torch.compile(run, fullgraph=True)(x), want)


@pytest.mark.parametrize("name", ROWS)
def test_an_abstract_rank_has_the_same_shapes(name: str) -> None:
    row = ROWS[name]
    for sizes, axis in (({"a": 3}, "a"), ({"a": 2, "b": 3}, ("a", "b") if row.several else "b")):
        x = inputs(row, sizes, axis, torch.float32)
        mesh = zf.Mesh(**sizes).abstract()
        run = zf.spmd(lambda b, a=axis: (row.call(b, a), first(row, a)(b)), mesh, data_axes=())
        got, grad = run(x[0])
        want = reference(row, sizes, axis, x)[0]
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert (grad.shape, grad.dtype) == (x[0].shape, x.dtype)


# Dtypes, strides and sizes, in the simulation


def simulated(row: Row, x: Tensor, f: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """What the collective, or ``f``, gives on two ranks that get their blocks as they are."""
    f = f or (lambda b: row.call(b, "a"))
    own = row.takes_varying
    mesh, batch = zf.Mesh(a=2), "local" if own else "replicated"
    run = zf.spmd(
        lambda _, b: zf.all_gather(f(b).unsqueeze(0), "a"), mesh, batch=batch, data_axes=("a",)
    )  # type: ignore[arg-type]
    out: Tensor = run(None, x if own else x[0])
    return out


REDUCED = (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.uint8)
MOVED = (*REDUCED, torch.bool, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2)


def widened(x: Tensor) -> Tensor:
    return x.float() if x.is_floating_point() or x.dtype == torch.uint16 else x.int()


@pytest.mark.parametrize("name", ROWS)
def test_dtypes(name: str) -> None:
    """Small whole numbers, exact in every dtype: sums in number dtypes, movement in all."""
    row = ROWS[name]
    dtypes = REDUCED if name.startswith("psum") else REDUCED[:3] if name == "pmean" else MOVED
    for dtype in dtypes:
        x = inputs(row, {"a": 2}, "a", torch.float32).round().clamp(0, 8).mul(2).to(dtype)
        got, want = simulated(row, x), reference(row, {"a": 2}, "a", widened(x))
        assert got.dtype == dtype
        assert torch.equal(got.to(want.dtype), want), dtype


STRANGE: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.mT.contiguous().mT,
    "every other": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "stride 0": lambda x: x[:, :1, :1].expand(x.shape),
    "ranks last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}


@pytest.mark.parametrize("strides", STRANGE)
@pytest.mark.parametrize("name", ROWS)
def test_strides(name: str, strides: str) -> None:
    row = ROWS[name]
    x = STRANGE[strides](inputs(row, {"a": 2}, "a"))
    torch.testing.assert_close(simulated(row, x), reference(row, {"a": 2}, "a", x))


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (2, 2, 1)])
@pytest.mark.parametrize("name", ROWS)
def test_empty_and_small_blocks(name: str, shape: tuple[int, ...]) -> None:
    row = ROWS[name]
    if name.endswith("-1") and "scatter" in name and shape[-1] == 1:
        shape = (1, 2, 2)
    x = inputs(row, {"a": 2}, "a").flatten(1)[:, : torch.Size(shape).numel()].reshape(2, *shape)
    want = reference(row, {"a": 2}, "a", x)
    assert torch.equal(simulated(row, x), want)
    grad = simulated(row, x, first(row, "a"))
    torch.testing.assert_close(grad, reference_derivatives(row, {"a": 2}, "a", x)["first"])


@pytest.mark.parametrize("name", ["psum", "pmean", "pvary", "ppermute"])
def test_0_dim_values(name: str) -> None:
    row, x = ROWS[name], torch.tensor([2.0, 2.0])
    assert torch.equal(simulated(row, x), reference(row, {"a": 2}, "a", x))


# Processes: everything in few calls, since tracing and starting cost more than the work.


def check_on_processes(sizes: dict[str, int], axis: Any, names: Sequence[str]) -> list[str]:
    """Values and derivatives on this mesh of processes; the names of what is wrong."""
    wrong = []
    for name in names:
        row = ROWS[name]
        x = inputs(row, sizes, axis) / 8
        want = {**reference_derivatives(row, sizes, axis, x)}
        want["value"] = reference(row, sizes, axis, x)
        kinds = {**DERIVED, "value": lambda row, axis: lambda b: row.call(b, axis)}
        for kind, derive in kinds.items():
            got = on_all_ranks(sizes, derive(row, axis), axis, row.takes_varying, x)
            if not torch.allclose(got, want[kind], rtol=1e-9, atol=1e-9):
                wrong.append(f"{name}, {kind}")
    return wrong


def check_programs_on_processes() -> list[str]:
    """The rows traced and compiled, all at once."""
    torch._dynamo.reset()
    wrong = []
    run, x, want = every_row("first", list(ROWS))
    for how, got in (
        ("traced", make_fx(run, tracing_mode="fake")(x)(x)),
        ("compiled", torch.compile(run, fullgraph=True, backend="aot_eager")(x)),
    ):
        wrong += [f"{k}, {how}" for k in want if not torch.allclose(got[k], want[k])]
    return wrong


def check_dtypes_on_processes() -> list[str]:
    """Reductions in the number dtypes, movement in every dtype that a wire must carry."""
    wrong = []
    for name, dtypes in (
        ("psum", REDUCED),
        ("psum_scatter", REDUCED),
        ("all_gather 1", MOVED),
        ("ppermute", MOVED),
        ("all_to_all 0 1", MOVED),
    ):
        row = ROWS[name]
        for dtype in dtypes:
            x = inputs(row, {"a": 2}, "a", torch.float32).round().clamp(0, 9).to(dtype)
            mesh = zf.Mesh(a=2)
            run = zf.spmd(
                lambda _, b, row=row: row.call(b, "a"), mesh, batch="local", data_axes=("a",)
            )
            got = run(None, x[mesh.rank])
            want = reference(row, {"a": 2}, "a", widened(x))[mesh.rank]
            if got.dtype != dtype or not torch.equal(got.to(want.dtype), want):
                wrong.append(f"{name}, {dtype}")
    for name, row in ROWS.items():
        for strides, strange in STRANGE.items():
            x = strange(inputs(row, {"a": 2}, "a"))
            mesh = zf.Mesh(a=2)
            run = zf.spmd(
                lambda _, b, row=row: row.call(b, "a"), mesh, batch="local", data_axes=("a",)
            )
            if not torch.allclose(
                run(None, x[mesh.rank]), reference(row, {"a": 2}, "a", x)[mesh.rank]
            ):
                wrong.append(f"{name}, {strides}")
    for shape in ((0, 4), (4, 0)):
        empty = torch.zeros(shape)
        run = zf.spmd(
            lambda _, b: zf.psum_scatter(zf.all_gather(zf.psum(b, "a"), "a"), "a"),
            zf.Mesh(a=2),
            batch="local",
            data_axes=("a",),
        )
        if run(None, empty).shape != shape:
            wrong.append(f"empty {shape}")
    return wrong


def test_two_processes() -> None:
    for wrong in run_on_processes(2, check_on_processes, {"a": 2}, "a", list(ROWS)):
        assert wrong == []


def test_programs_on_two_processes() -> None:
    for wrong in run_on_processes(2, check_programs_on_processes):
        assert wrong == []


def test_dtypes_on_two_processes() -> None:
    for wrong in run_on_processes(2, check_dtypes_on_processes):
        assert wrong == []


def check_two_axes_on_processes() -> list[str]:
    sizes = {"a": 2, "b": 2}
    wrong = []
    for axis in ("a", "b", ("a", "b")):
        names = ["psum", "all_gather 1", "psum_scatter", "pscatter", "pvary"]
        wrong += check_on_processes(sizes, axis, names if axis == ("a", "b") else names[1:3])
    wrong += check_on_processes(sizes, "b", ["ppermute", "all_to_all 0 1"])
    mesh = zf.Mesh(**sizes)
    place = zf.spmd(lambda _: zf.axis_index(("a", "b")), mesh, data_axes=())(None)
    return wrong if place.item() == mesh.rank else [*wrong, "axis_index"]


def test_four_processes_on_two_axes() -> None:
    for wrong in run_on_processes(4, check_two_axes_on_processes):
        assert wrong == []


# Places and sizes


def test_places_are_row_major() -> None:
    mesh = zf.Mesh(dp=2, tp=3)

    def program(_: Any) -> Tensor:
        both = ("dp", "tp")
        assert (zf.axis_size("dp"), zf.axis_size(both)) == (2, 6)
        place = torch.stack([zf.axis_index("dp"), zf.axis_index("tp"), zf.axis_index(both)])
        return zf.all_gather(place[None], both)

    want = [[rank // 3, rank % 3, rank] for rank in range(6)]
    assert zf.spmd(program, mesh)(None).tolist() == want


# Refusals


def on_two(f: Callable[[Tensor], Tensor], x: Tensor | None = None) -> Any:
    x = torch.ones(4, 3) if x is None else x
    return zf.spmd(lambda _, x: zf.psum(f(x), "dp"), zf.Mesh(dp=2))(None, x)


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda x: zf.psum(x > 0, "dp"), TypeError, "psum of a bool tensor"),
        (lambda x: zf.psum_scatter(x > 0, "dp"), TypeError, "psum_scatter of a bool tensor"),
        (
            lambda x: zf.psum(x.to(torch.float8_e5m2), "dp"),
            TypeError,
            r"psum of a tensor of dtype torch.float8_e5m2, which has no sum: .* x.float\(\)",
        ),
        (lambda x: zf.psum({"x": x}, "dp"), TypeError, r"psum takes a tensor, got \{'x'.*tree_map"),
        (lambda x: zf.all_gather(1.0, "dp"), TypeError, r"all_gather takes a tensor, got 1.0"),
        (lambda x: zf.psum(x, ("dp", "dp")), ValueError, r"\('dp', 'dp'\), .* axis twice"),
        (lambda x: zf.ppermute(x, ("dp",), []), TypeError, r"ppermute goes over one mesh axis"),
        (lambda x: zf.all_to_all(x, ("dp",)), TypeError, r"all_to_all goes over one mesh axis"),
        (lambda x: zf.pmean(x.int(), "dp"), TypeError, "pmean of a tensor of dtype torch.int32"),
        (lambda x: zf.psum(x, "tp"), NameError, r"unknown mesh axis 'tp'; the mesh has \['dp'\]"),
        (
            lambda x: zf.all_gather(x, "dp", 2),
            ValueError,
            r"dim 2 is not .* shape \(2, 3\)",
        ),
        (lambda x: zf.all_gather(x.sum(), "dp"), ValueError, r"dim 0 .* x.reshape\(1\)"),
        (
            lambda x: zf.psum_scatter(x, "dp", 1),
            ValueError,
            r"psum_scatter over 'dp': dimension 1 of shape \(2, 3\) is not divisible by .* 2",
        ),
        (lambda x: zf.all_to_all(x, "dp", 1), ValueError, r"all_to_all over 'dp': dimension 1"),
        (lambda x: zf.ppermute(x, "dp", [(0, 1), (0, 0)]), ValueError, r"sources \[0, 0\]"),
        (lambda x: zf.ppermute(x, "dp", [(0, 2)]), ValueError, r"targets \[2\]"),
        (lambda x: zf.pvary(x, "dp"), ValueError, "pvary over 'dp' takes a value that all ranks"),
        (lambda x: zf.pscatter(x, "dp"), ValueError, "pscatter over 'dp' takes a value that all"),
    ],
)
def test_refusals(f: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        on_two(f)


def test_a_sum_that_meets_varying_values_needs_pvary() -> None:
    """Its gradient would be each rank's own part; the error names the cure, and the cure works."""

    def deviation(x: Tensor, cure: bool) -> Tensor:
        mean = zf.pmean(x.mean(), "dp")
        mean = zf.pvary(mean, "dp") if cure else mean
        return zf.pmean((x.exp() * mean).mean(), "dp")

    def program(_: Any, x: Tensor, cure: bool) -> Tensor:
        return zf.all_gather(zf.grad(lambda x: deviation(x, cure))(x), "dp")

    run = zf.spmd(program, zf.Mesh(dp=2))
    x = torch.randn(6, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"a psum, pmean .* met varying values: .* zf.pvary\(x"):
        run(None, x, False)
    want = torch.func.grad(lambda x: (x.exp() * x.mean()).mean())(x)
    torch.testing.assert_close(run(None, x, True), want)


def test_outside_of_spmd() -> None:
    with pytest.raises(NameError, match=r"unknown mesh axis 'dp'; no axis is bound here: call"):
        zf.psum(torch.ones(2), "dp")


def test_a_gradient_of_stride_zero() -> None:
    def program(_: Any, x: Tensor) -> Tensor:
        g = zf.grad(lambda x: zf.all_gather(x, "dp").sum())(x)
        return zf.all_gather(g, "dp")

    assert zf.spmd(program, zf.Mesh(dp=2))(None, torch.ones(4)).tolist() == [2.0] * 4
