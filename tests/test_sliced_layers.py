"""Each layer of this rank's slices, against the dense formula: values, gradients, transforms."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zero_fn as zf
from zero_fn import tree

from .processes import run_on_processes

# float64, sums of a few dozen terms
CLOSE: Any = {"rtol": 1e-12, "atol": 1e-12}


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


# A block of column_linear and row_linear: 3 sequences of 8, 5 features in, 12 hidden, 7 out.

BLOCK = {
    "x": None,
    "up.weight": 0,
    "up.bias": 0,
    "down.weight": 1,
    "down.bias": None,
}


WEIGHTS = normal(3, 8, 7, seed=6)


def block_params() -> Any:
    return {
        "x": normal(3, 8, 5, seed=1),
        "up": {"weight": normal(12, 5, seed=2), "bias": normal(12, seed=3)},
        "down": {"weight": normal(7, 12, seed=4), "bias": normal(7, seed=5)},
    }


def block_dense(params: Any, _: Any) -> Tensor:
    hidden = F.gelu(params["x"] @ params["up"]["weight"].T + params["up"]["bias"])
    y = hidden @ params["down"]["weight"].T + params["down"]["bias"]
    return (y.sin() * WEIGHTS).sum()


def block_sliced(params: Any, _: Any, sequence_dim: int | None = None) -> Tensor:
    x, weights = params["x"], WEIGHTS
    if sequence_dim is not None:
        x, weights = zf.pscatter(x, "tp", sequence_dim), zf.pscatter(weights, "tp", sequence_dim)
    up, down = params["up"], params["down"]
    hidden = F.gelu(zf.column_linear(x, up["weight"], up["bias"], sequence_dim=sequence_dim))
    y = zf.row_linear(hidden, down["weight"], down["bias"], sequence_dim=sequence_dim)
    value = (y.sin() * weights).sum()
    return value if sequence_dim is None else zf.psum(value, "tp")


def block_along_the_sequence(params: Any, batch: Any) -> Tensor:
    return block_sliced(params, batch, sequence_dim=1)


# An embedding and a loss with a tied table, over a vocabulary that no axis of 2 or 4 divides.

VOCABULARY = 11
TOKENS = {"table": zf.SliceRule(0, pad=True), "shift": None}


def token_params() -> Any:
    return {"table": normal(VOCABULARY, 5, seed=7), "shift": normal(4, 5, seed=8)}


def token_batch() -> tuple[Tensor, Tensor]:
    tokens = torch.arange(12).reshape(3, 4) % VOCABULARY
    targets = (7 * tokens + 3) % VOCABULARY
    targets[1, 2] = -100  # takes no part
    return tokens, targets


def tokens_dense(params: Any, batch: Any) -> Tensor:
    x = F.embedding(batch[0], params["table"]) + params["shift"]
    logits = x.sin() @ params["table"].T * 3
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), batch[1].reshape(-1))


def tokens_sliced(params: Any, batch: Any, sequence_dim: int | None = None) -> Tensor:
    table, shift = params["table"], params["shift"]
    x = zf.vocab_embedding(batch[0], table, vocabulary=VOCABULARY, sequence_dim=sequence_dim) + (
        shift if sequence_dim is None else zf.pscatter(shift, "tp")
    )
    logits = zf.column_linear(x.sin(), table, sequence_dim=sequence_dim) * 3
    return zf.vocab_cross_entropy(logits, batch[1], vocabulary=VOCABULARY)


def tokens_along_the_sequence(params: Any, batch: Any) -> Tensor:
    return tokens_sliced(params, batch, sequence_dim=1)


CASES: dict[str, Any] = {
    "block": (block_params, BLOCK, lambda: torch.zeros(1), block_dense, block_sliced),
    "block, sequence": (
        *(block_params, BLOCK, lambda: torch.zeros(1), block_dense),
        block_along_the_sequence,
    ),
    "tokens": (token_params, TOKENS, token_batch, tokens_dense, tokens_sliced),
    "tokens, sequence": (
        *(token_params, TOKENS, token_batch, tokens_dense),
        tokens_along_the_sequence,
    ),
}


def dense(case: str) -> tuple[Any, Tensor]:
    params, _, batch, formula, _ = CASES[case]
    leaves, treedef = tree.flatten(tree.map(lambda x: x.requires_grad_(), params()))
    value = formula(tree.unflatten(treedef, leaves), batch())
    return tree.unflatten(treedef, torch.autograd.grad(value, leaves)), value.detach()


def gradients(case: str) -> Callable[..., Any]:
    """The program of one rank: slices to their gradients, and the value."""
    sliced = CASES[case][-1]

    def program(params: Any, batch: Any) -> Any:
        return zf.grad_and_value(lambda p: sliced(zf.local_slices(p), batch))(params)

    return program


def run(case: str, sizes: dict[str, int], jit: bool = False) -> tuple[Any, Tensor]:
    mesh = zf.Mesh(**sizes)
    params, rules, batch, *_ = CASES[case]
    slices = zf.spmd(lambda p: zf.slice_params(p, rules), mesh)(params())
    step = zf.spmd(gradients(case), mesh, batch="replicated")
    grads, value = (zf.jit(step) if jit else step)(slices, batch())
    return zf.gather_tree(grads, mesh), value


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_are_the_dense_ones(case: str, tp: int, jit: bool) -> None:
    torch.testing.assert_close(run(case, {"tp": tp}, jit), dense(case), **CLOSE)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_processes_compute_the_same(case: str, ranks: int) -> None:
    want = dense(case)
    for got in run_on_processes(ranks, run, case, {"tp": ranks}, ranks == 2):
        torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_a_sweep_over_sliced_models(case: str) -> None:
    """vmap around the whole program."""
    mesh = zf.Mesh(tp=2)
    params, rules, batch, formula, _ = CASES[case]
    many = tree.map(lambda x: torch.stack([x, x.flip(0), x * 0.3]), params())
    init = zf.spmd(lambda p: zf.slice_params(p, rules), mesh)
    step = zf.spmd(gradients(case), mesh, batch="replicated")

    def gradient(params: Any, batch: Any) -> Any:
        return zf.gather_tree(step(init(params), batch)[0], mesh)

    got = torch.func.vmap(gradient, (0, None))(many, batch())
    want = torch.func.vmap(torch.func.grad(formula), (0, None))(many, batch())
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_forward_derivatives_and_second_ones(case: str) -> None:
    """A Hessian-vector product, and a jvp, through the ranks."""
    mesh = zf.Mesh(tp=4)
    params, rules, batch, formula, sliced = CASES[case]
    directions = tree.map(lambda x: x.flip(0).cos(), params())

    def program(state: Any, batch: Any) -> Any:
        x, v = (zf.slice_params(part, rules) for part in state)

        def loss(p: Any) -> Tensor:
            return sliced(zf.local_slices(p), batch)

        def slope(p: Any) -> Tensor:
            return torch.func.jvp(loss, (p,), (v,))[1]

        return zf.grad_and_value(slope)(x)

    grads, slope = zf.spmd(program, mesh, batch="replicated")((params(), directions), batch())

    def dense_slope(p: Any) -> Tensor:
        return torch.func.jvp(lambda p: formula(p, batch()), (p,), (directions,))[1]

    want = torch.func.grad_and_value(dense_slope)(params())
    torch.testing.assert_close((zf.gather_tree(grads, mesh), slope), want, **CLOSE)


@pytest.mark.parametrize("case", CASES)
def test_recomputed_layers_have_the_same_gradients(case: str) -> None:
    """What remat returns is the same on all ranks where the function's result was."""
    mesh = zf.Mesh(dp=2, tp=2)
    params, rules, batch, _, sliced = CASES[case]

    def program(params: Any, batch: Any) -> Any:
        slices = zf.slice_params(params, rules)
        recomputed = zf.remat(sliced)
        return zf.grad_and_value(lambda p: recomputed(zf.local_slices(p), batch))(slices)

    grads, value = zf.spmd(program, mesh, batch="replicated")(params(), batch())
    torch.testing.assert_close((zf.gather_tree(grads, mesh), value), dense(case), **CLOSE)


# The loss by itself


def losses(
    logits: Tensor, targets: Tensor, tp: int, vocabulary: int, **options: Any
) -> tuple[Tensor, Tensor]:
    """The value and the gradient by whole logits, cut in the program."""
    mesh = zf.Mesh(tp=tp)
    rules = {"*": zf.SliceRule(logits.ndim - 1, pad=True)}

    def program(pieces: Any, targets: Tensor) -> Any:
        def loss(pieces: Any) -> Tensor:
            (local,) = zf.local_slices(pieces)
            found = zf.vocab_cross_entropy(local, targets, vocabulary=vocabulary, **options)
            return found.sum()

        return zf.grad_and_value(loss)(pieces)

    pieces = zf.spmd(lambda p: zf.slice_params(p, rules), mesh)((logits,))
    grads, value = zf.spmd(program, mesh, batch="replicated")(pieces, targets)
    return value, zf.gather_tree(grads, mesh)[0]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("vocabulary", "tp"), [(8, 4), (11, 4), (3, 4), (1, 2), (5, 3)])
def test_the_loss_over_any_vocabulary(vocabulary: int, tp: int, reduction: Any) -> None:
    """Ranks with nothing but padding included: 3 over 4, 1 over 2."""
    logits = normal(6, vocabulary)
    targets = torch.arange(6) % vocabulary
    targets[2] = 77
    got = losses(logits, targets, tp, vocabulary, ignore_index=77, reduction=reduction)
    logits.requires_grad_()
    want = F.cross_entropy(logits, targets, ignore_index=77, reduction=reduction).sum()
    torch.testing.assert_close(got, (want, torch.autograd.grad(want, logits)[0]), **CLOSE)


def test_second_derivatives_of_the_loss_where_a_rank_has_nothing_but_padding() -> None:
    logits, direction, targets = normal(6, 3), normal(6, 3, seed=1), torch.arange(6) % 3
    mesh, rules = zf.Mesh(tp=4), {"*": zf.SliceRule(1, pad=True)}

    def program(state: Any, targets: Tensor) -> Any:
        x, v = (zf.slice_params((part,), rules) for part in state)

        def loss(x: Any) -> Tensor:
            return zf.vocab_cross_entropy(zf.local_slices(x)[0], targets, vocabulary=3)

        def slope(x: Any) -> Tensor:
            return torch.func.jvp(loss, (x,), (v,))[1]

        return zf.grad_and_value(slope)(x)

    run = zf.spmd(program, mesh, batch="replicated")
    grads, slope = run((logits, direction), targets)

    def dense_slope(x: Tensor) -> Tensor:
        return torch.func.jvp(lambda x: F.cross_entropy(x, targets), (x,), (direction,))[1]

    want, want_slope = torch.func.grad_and_value(dense_slope)(logits)
    torch.testing.assert_close(slope, want_slope, **CLOSE)
    torch.testing.assert_close(zf.gather_tree(grads, mesh)[0], want, **CLOSE)


@pytest.mark.parametrize("scale", [1e4, 1e300])
def test_the_loss_of_huge_logits_is_finite(scale: float) -> None:
    logits, targets = normal(6, 5) * scale, torch.arange(6) % 5
    value, grad = losses(logits, targets, 4, 5)
    logits.requires_grad_()
    want = F.cross_entropy(logits, targets)
    torch.testing.assert_close(value, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, torch.autograd.grad(want, logits)[0], **CLOSE)
    assert value.isfinite()


def test_half_precision_is_computed_in_float32() -> None:
    logits, targets = normal(6, 9).bfloat16(), torch.arange(6)
    value, grad = losses(logits, targets, 2, 9)
    assert value.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    torch.testing.assert_close(value, F.cross_entropy(logits.float(), targets))
    dense, _ = zf.vocab_cross_entropy(logits, targets, axis=None), None
    torch.testing.assert_close(value, dense)


@pytest.mark.parametrize("bad", [-1, 11, 12])
def test_an_id_outside_the_vocabulary_is_nan(bad: int) -> None:
    """11 stands in the padding, 12 in none."""
    targets = torch.tensor([0, bad])
    value, _ = losses(normal(2, 11), targets, 4, 11, reduction="none")
    assert value.isnan()
    mesh = zf.Mesh(tp=4)
    table = zf.spmd(lambda t: zf.slice_params(t, {"": zf.SliceRule(0, pad=True)}), mesh)(
        normal(11, 3)
    )
    embed = zf.spmd(
        lambda t, ids: zf.vocab_embedding(ids, zf.local_slices(t), vocabulary=11),
        mesh,
        batch="replicated",
    )
    rows = embed(table, targets)
    assert rows[0].isfinite().all()
    assert rows[1].isnan().all()


def test_no_collective_moves_logits() -> None:
    """Of a token two numbers travel in the loss, whatever the vocabulary."""
    mesh = zf.Mesh(tp=4).abstract()
    tokens, vocabulary, width = 32, 1000, 16

    def program(table: Any, batch: Any) -> Any:
        def loss(table: Any) -> Tensor:
            logits = zf.column_linear(batch[0], zf.local_slices(table))
            return zf.vocab_cross_entropy(logits, batch[1], vocabulary=vocabulary)

        return zf.grad_and_value(loss)(table)

    rules = {"": zf.SliceRule(0, pad=True)}
    table = zf.spmd(lambda t: zf.slice_params(t, rules), mesh)(torch.zeros(vocabulary, width))
    batch = torch.zeros(tokens, width), torch.zeros(tokens, dtype=torch.int64)
    traced = zf.jit(zf.spmd(program, mesh, batch="replicated")).trace(table, batch)
    moved = [(found.kind, found.calls, found.bytes_in) for found in traced.collectives()]
    assert moved == [("all_gather", 1, tokens * 2 * 4)]


# Refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: zf.column_linear(torch.ones(2, 3), torch.ones(4, 5), axis=None),
            r"column_linear: x of shape \(2, 3\) and weight of shape \(4, 5\) don't fit; on a rank "
            r"the weight is \(outputs / ranks, inputs\)",
        ),
        (
            lambda: zf.row_linear(torch.ones(2, 8), torch.ones(4, 4)),
            r"row_linear: x of shape \(2, 8\) and weight of shape \(4, 4\) don't fit; on a rank "
            r"the weight is \(outputs, inputs / ranks\)",
        ),
        (
            lambda: zf.vocab_embedding(torch.zeros(2).long(), torch.ones(5, 4), vocabulary=11),
            r"table: 5 rows on each of the 2 ranks of 'tp', and a vocabulary of 11 has 6",
        ),
        (
            lambda: zf.vocab_cross_entropy(torch.ones(2, 5), torch.zeros(2).long(), vocabulary=11),
            r"logits: 5 rows on each of the 2 ranks of 'tp', and a vocabulary of 11 has 6",
        ),
        (
            lambda: zf.vocab_cross_entropy(torch.ones(2, 5), torch.zeros(3).long()),
            r"logits of shape \(2, 5\) are not \(..., vocabulary\) of targets of shape \(3,\)",
        ),
        (
            lambda: zf.vocab_cross_entropy(
                torch.ones(2, 5),
                torch.zeros(2).long(),
                reduction="avg",  # type: ignore[arg-type]
            ),
            "reduction is 'avg'; it is 'mean', 'sum' or 'none'",
        ),
        (
            lambda: zf.row_linear(
                zf.pvary(torch.ones(1, 5, 4), "tp"), torch.ones(3, 4), sequence_dim=1
            ),
            r"dimension 1 of shape \(1, 5, 3\) is not divisible by the axis size 2",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(call: Callable[[], Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zf.spmd(lambda _: call(), zf.Mesh(tp=2))(None)


def test_columns_of_what_varies_are_refused_in_the_simulation() -> None:
    def program(_: Any) -> Tensor:
        part = torch.ones(2, 4) * zf.axis_index("tp")
        return zf.column_linear(part, torch.ones(3, 4))

    with pytest.raises(ValueError, match="pvary over 'tp' takes a value that all ranks share"):
        zf.spmd(program, zf.Mesh(tp=2))(None)
