"""Recomputation where it could go wrong without a word: what the function captures, at whatever
level of torch.func, what it draws, and derivatives of every order."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import jvp, vmap

import zero_fn as zf
from zero_fn.captures import captured, replaced

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]

P = torch.tensor(0.3, dtype=torch.float64)
XS = torch.linspace(-1, 2, 3, dtype=torch.float64)
YS = torch.linspace(1, 3, 3, dtype=torch.float64)  # as many as XS: a mix-up would go unnoticed


def by_backward(f: Callable[[Tensor], Tensor]) -> Tensor:
    p = P.clone().requires_grad_()
    f(p).backward()
    assert p.grad is not None
    return p.grad


def one(wrap: Wrap, x: Tensor) -> Callable[[Tensor], Tensor]:
    """A function of p alone that holds on to x."""
    return wrap(lambda p: (p * x).sin() * p)


def two(wrap: Wrap, p: Tensor) -> Tensor:
    """Two maps, whose values are both captured."""
    return vmap(lambda x: vmap(lambda y: wrap(lambda p: (p * x).sin() + y * p * p)(p))(YS))(
        XS
    ).sum()


def simulated(wrap: Wrap, p: Tensor) -> Tensor:
    def program(p: Tensor, x: Tensor) -> Tensor:
        return zf.psum(one(wrap, x)(zf.pvary(p, "dp")).sum(), "dp")

    out: Tensor = zf.spmd(program, zf.Mesh(dp=3))(p, XS)
    return out


def swept(wrap: Wrap) -> Tensor:
    """A sweep around ranks, each of which captures its batch and the swept value."""

    def program(p: Tensor, x: Tensor, scale: Tensor) -> Tensor:
        f = wrap(lambda p: (p * x * scale).sin().sum())
        return zf.psum(zf.grad(f)(p), "dp")

    run = zf.spmd(program, zf.Mesh(dp=3), batch=("split", "replicated"))
    return vmap(lambda scale: run(P, XS, scale))(YS)


MAPPED: dict[str, Callable[[Wrap], Any]] = {
    "grad(vmap)": lambda wrap: zf.grad(lambda p: vmap(lambda x: one(wrap, x)(p))(XS).sum())(P),
    "vmap(grad)": lambda wrap: vmap(lambda x: zf.grad(one(wrap, x))(P))(XS),
    "vmap(grad(grad))": lambda wrap: vmap(lambda x: zf.grad(zf.grad(one(wrap, x)))(P))(XS),
    "vmap(jvp(grad))": lambda wrap: vmap(lambda x: jvp(zf.grad(one(wrap, x)), (P,), (P,))[1])(XS),
    "grad(vmap(vmap))": lambda wrap: zf.grad(lambda p: two(wrap, p))(P),
    "vmap(vmap).backward": lambda wrap: by_backward(lambda p: two(wrap, p)),
    "grad(grad(vmap(vmap)))": lambda wrap: zf.grad(zf.grad(lambda p: two(wrap, p)))(P),
    "grad(ranks)": lambda wrap: torch.func.grad(lambda p: simulated(wrap, p))(P),
    "ranks.backward": lambda wrap: by_backward(lambda p: simulated(wrap, p)),
    "vmap(ranks)": swept,
}


@pytest.mark.parametrize("name", MAPPED)
def test_what_is_captured_at_a_level_of_vmap(name: str) -> None:
    """The backward runs at other levels than the forward; a captured value keeps its meaning."""
    torch.testing.assert_close(MAPPED[name](zf.remat), MAPPED[name](lambda f: f))


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.x = [x]

    def method(self, p: Tensor) -> Tensor:
        return p * self.x[0]


@dataclass(slots=True)
class Slots:
    x: Tensor


def recursive(x: Tensor) -> Callable[[Tensor], Tensor]:
    def power(p: Tensor, n: int) -> Tensor:
        return p if n == 0 else power(p, n - 1) * x

    return lambda p: power(p, 2)


HOLD: dict[str, Callable[[Tensor], Callable[[Tensor], Tensor]]] = {
    "closure": lambda x: lambda p: p * x,
    "default": lambda x: lambda p, x=x: p * x,
    "keyword default": lambda x: lambda p, *, x=x: p * x,
    "partial": lambda x: functools.partial(torch.mul, x),
    "keywords of a partial": lambda x: functools.partial(torch.mul, other=x),
    "bound method": lambda x: Holder(x).method,
    "field with slots": lambda x: (lambda held: lambda p: p * held.x)(Slots(x)),
    "container": lambda x: (lambda held: lambda p: p * held["a"][0])({"a": (x, [])}),
    "another function": lambda x: (lambda g: lambda p: g(p) + 1)(lambda p: p * x),
    "itself": recursive,
}


@pytest.mark.parametrize("name", HOLD)
def test_every_way_to_hold_a_tensor(name: str) -> None:
    """What is held at a level of vmap is used with its own value in the backward too, ..."""

    def gradient(wrap: Wrap) -> Tensor:
        return by_backward(lambda p: vmap(lambda x: wrap(HOLD[name](x))(p))(XS).sin().sum())

    torch.testing.assert_close(gradient(zf.remat), gradient(lambda f: f))


@pytest.mark.parametrize("name", HOLD)
def test_every_way_to_hold_a_differentiated_tensor(name: str) -> None:
    """... and what is differentiated is refused, however it is held."""
    with pytest.raises(ValueError, match=r"remat: .* captures the tensor .*Pass it as an argument"):
        zf.grad(lambda x: zf.remat(HOLD[name](x))(P))(P)
    nested = zf.grad(lambda x: zf.grad(lambda p: zf.remat(HOLD[name](x))(p))(P))
    with pytest.raises(ValueError, match=r"captures the tensor"):
        nested(P)


def test_a_captured_piece_is_found() -> None:
    def program(w: Tensor, x: Tensor) -> Any:
        def loss(pieces: Any) -> Tensor:
            return zf.pmean(zf.remat(lambda x: (x * zf.unshard(pieces)).sum())(x), "dp")

        return zf.grad(loss)(zf.shard(w, 3))

    with pytest.raises(ValueError, match=r"captures the tensor pieces.local"):
        zf.spmd(program, zf.Mesh(dp=2))(torch.ones(4), torch.ones(2, 4))


def test_each_of_many_short_lived_containers_is_looked_into() -> None:
    """Defaults and arguments of partials are read through temporaries, whose ids come again."""

    def product(a: Tensor, b: Tensor, p: Tensor) -> Tensor:
        return a * b * p

    def many(x: Tensor) -> Callable[[Tensor], Tensor]:
        parts = [functools.partial(product, P.clone(), P.clone()) for _ in range(9)]
        parts.insert(4, functools.partial(product, P.clone(), x))
        return lambda p: torch.stack([f(p) for f in parts]).sum()

    with pytest.raises(ValueError, match="captures the tensor"):
        zf.grad(lambda x: zf.remat(many(x))(P))(P)


HELD_GLOBALLY = {"w": torch.ones(2, requires_grad=True)}


def reads_a_global(p: Tensor) -> Tensor:
    return p * HELD_GLOBALLY["w"]


def calls_one_that_does(p: Tensor) -> Tensor:
    return reads_a_global(p).sum()


@pytest.mark.parametrize("f", [reads_a_global, calls_one_that_does])
def test_a_global_variable_is_a_capture(f: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"captures the tensor HELD_GLOBALLY\['w'\]"):
        zf.remat(f)(torch.ones(2))


def test_a_constant_made_inside_grad_may_be_captured() -> None:
    """torch.func wraps it like what is differentiated, and it is not."""

    def loss(p: Tensor) -> Tensor:
        doubled = XS * 2
        return zf.remat(lambda p: (p * doubled).sum())(p)

    torch.testing.assert_close(zf.grad(loss)(P), (XS * 2).sum())


def test_what_holds_nothing_is_not_copied() -> None:
    def counted(p: Tensor) -> Tensor:
        calls.append(p)
        return p

    calls: list[Tensor] = []
    assert replaced(counted, {}) is counted
    assert replaced(counted, {id(P): XS}) is counted
    other = replaced(HOLD["closure"](P), {id(P): XS})
    assert torch.equal(other(YS), YS * XS)
    assert [x is P for _, x in captured(HOLD["bound method"](P))] == [True]


def test_complex_results_and_arguments_keep_their_gradients() -> None:
    def loss(wrap: Wrap, x: Tensor) -> Tensor:
        def turn(z: Tensor) -> Tensor:
            return z * z

        spectrum = wrap(torch.fft.fft)(x)
        return wrap(turn)(spectrum).abs().sum()

    want = torch.func.grad(functools.partial(loss, lambda f: f))(YS)
    assert want.abs().min() > 1
    torch.testing.assert_close(zf.grad(functools.partial(loss, zf.remat))(YS), want)


def test_random_numbers_are_refused() -> None:
    """The backward would draw others: a gradient of another function, without a word."""

    def noisy(x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(x, 0.5)

    gradient = zf.grad(lambda x: zf.remat(noisy)(x).sum())
    message = r"remat: 'noisy' draws random numbers .*draw them outside and pass them as an arg"
    for run in (gradient, zf.jit(gradient)):
        with pytest.raises(ValueError, match=message):
            run(torch.ones(4))
    with pytest.raises(ValueError, match=message):
        vmap(gradient, randomness="different")(torch.ones(3, 4))
    mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
    got = zf.grad(lambda x: zf.remat(lambda x, mask: x * mask * 2)(x, mask).sum())(torch.ones(4))
    assert torch.equal(got, mask * 2)


def test_attention_without_dropout_draws_nothing() -> None:
    attend = torch.nn.functional.scaled_dot_product_attention
    q = torch.randn(1, 2, 4, 4)
    want = torch.func.grad(lambda q: attend(q, q, q).sum())(q)
    torch.testing.assert_close(zf.grad(lambda q: zf.remat(attend)(q, q, q).sum())(q), want)
    with pytest.raises(ValueError, match="draws random numbers"):
        zf.remat(attend)(q, q, q, dropout_p=0.5)


def test_forward_mode() -> None:
    def f(x: Tensor, n: Tensor, y: Tensor) -> Any:
        return {"out": x.sin() * n * y, "n": n}

    def pushed(wrap: Wrap, x: Tensor) -> Tensor:
        return jvp(lambda x: wrap(f)(x, torch.tensor(3), YS)["out"], (x,), (x.cos(),))[1]

    torch.testing.assert_close(pushed(zf.remat, XS), pushed(lambda f: f, XS))
    for derive in (
        lambda wrap: zf.grad(lambda x: pushed(wrap, x).sum())(XS),
        lambda wrap: jvp(zf.grad(lambda x: pushed(wrap, x).sum()), (XS,), (YS,)),
        lambda wrap: jvp(lambda x: pushed(wrap, x), (XS,), (YS,)),
        lambda wrap: torch.func.hessian(lambda x: wrap(f)(x, torch.tensor(3), YS)["out"].sum())(XS),
    ):
        torch.testing.assert_close(derive(zf.remat), derive(lambda f: f))


def test_what_ranks_share_is_shared_after_remat() -> None:
    """A psum inside meets pvary outside, and a shared result leaves the program."""
    mesh = zf.Mesh(dp=2, tp=3)
    x = torch.randn(3, 4, dtype=torch.float64)

    def block(x: Any, w: Any) -> Any:
        part = w * (1 + zf.axis_index("tp"))
        return zf.psum((zf.pvary(x, "tp") * part).sin(), "tp"), part

    def run(f: Any) -> Any:
        def loss(x: Any, w: Any) -> Any:
            y, part = f(x, w[0])
            y, _ = f(y, w[1] + part)
            return y.square().sum()

        def program(x: Any, w: Any) -> Any:
            def scattered(x: Any, w: Any) -> Any:
                return loss(x, zf.pvary(w, "tp"))

            return zf.grad_and_value(scattered, (0, 1))(x, w)

        return zf.spmd(program, mesh, batch="replicated")(x, x.cos()[:2])

    torch.testing.assert_close(run(zf.remat(block)), run(block))


def wide(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    h = zf.checkpoint_name(x @ w, "first")
    h = zf.checkpoint_name(torch.tanh(h), "second")
    return (torch.sin(h @ v) * h).sum()


W, V, X = (
    torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
    for i in range(3)
)
SAVED = [(), ("first",), ("second",), ("first", "second")]


@pytest.mark.parametrize("save", SAVED)
def test_what_is_saved_changes_no_derivative(save: tuple[str, ...]) -> None:
    f = zf.remat(wide, save=save)

    def second(f: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda w: zf.grad(lambda w: f(w, V, X))(w).square().sum()

    close = torch.testing.assert_close
    close(f(W, V, X), wide(W, V, X))
    close(zf.grad(f, (0, 1, 2))(W, V, X), zf.grad(wide, (0, 1, 2))(W, V, X))
    close(zf.grad(second(f))(W), zf.grad(second(wide))(W))
    close(jvp(f, (W, V, X), (V, X, W)), jvp(wide, (W, V, X), (V, X, W)))
    for dims in ((0, None, None), (None, 0, 0)):
        given = tuple(
            torch.stack([x, 2 * x]) if d == 0 else x for x, d in zip((W, V, X), dims, strict=True)
        )
        close(vmap(zf.grad(f), dims)(*given), vmap(zf.grad(wide), dims)(*given))
        mapped = zf.grad(lambda *a: vmap(f, dims)(*a).sum(), (0, 1, 2))  # noqa: B023
        close(mapped(*given), zf.grad(lambda *a: vmap(wide, dims)(*a).sum(), (0, 1, 2))(*given))  # noqa: B023

    def ranks(f: Callable[..., Tensor]) -> Any:
        def program(w: Tensor, x: Tensor) -> Tensor:
            return zf.grad(lambda w: zf.psum(f(zf.pvary(w, "dp"), zf.pvary(V, "dp"), x), "dp"))(w)

        return zf.spmd(program, zf.Mesh(dp=2))(W, X)

    close(ranks(f), ranks(wide))


def test_what_is_saved_is_not_computed_again() -> None:
    """Products and hyperbolic tangents in the traced gradient."""

    def counts(f: Callable[..., Tensor]) -> tuple[int, int]:
        program = zf.jit(zf.grad(f)).trace(W, V, X)
        names = [str(node.target) for node in program.graph_module.graph.nodes]
        return sum("aten.mm" in n for n in names), sum("aten.tanh.default" in n for n in names)

    plain, again = counts(wide), counts(zf.remat(wide))
    assert again[0] > plain[0]
    assert again[1] > plain[1]
    first, second = (counts(zf.remat(wide, save=(name,))) for name in ("first", "second"))
    assert first == (again[0] - 1, again[1])
    assert second == again  # the derivative of tanh needs the tanh that is computed again


def test_errors_of_saving() -> None:
    with pytest.raises(
        ValueError, match=r"save names 'third', and 'wide' has the names \['first', 'se"
    ):
        zf.remat(wide, save=("third",))(W, V, X)
    with pytest.raises(TypeError, match="save is 'first'; it is a sequence of names"):
        zf.remat(wide, save="first")
