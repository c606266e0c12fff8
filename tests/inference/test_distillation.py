"""Distillation in chunks: the plain formula's loss and gradients, and little memory."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zero_fn as zf
from tests.memory import peak
from zero_fn import tree
from zero_fn.models import gpt

VOCABULARY, TOKENS = 37, (2, 5)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def inputs() -> dict[str, Any]:
    targets = torch.arange(10).view(TOKENS) * 4 % VOCABULARY
    targets[1, 2] = -100
    return {
        "student": (normal(*TOKENS, 6, seed=0), normal(VOCABULARY, 6, seed=1)),
        "teacher": (normal(*TOKENS, 9, seed=2), normal(VOCABULARY, 9, seed=3)),
        "targets": targets,
    }


def plain(s: Any, t: Any, targets: Tensor | None, T: float, alpha: float, kind: str) -> Tensor:
    """The formula, with all logits."""
    s, t = (x if isinstance(x, Tensor) else x[0] @ x[1].T for x in (s, t))
    log_s, log_t = (s / T).log_softmax(-1), (t / T).log_softmax(-1)
    forward = F.kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)
    reverse = F.kl_div(log_t, log_s, reduction="none", log_target=True).sum(-1)
    distance = {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2}[kind]
    if targets is None:
        return T**2 * distance.mean()
    entropy = F.cross_entropy(s.flatten(0, -2), targets.flatten(), reduction="none").view(TOKENS)
    taking = targets != -100
    return (alpha * T**2 * distance + (1 - alpha) * entropy)[taking].mean()


@pytest.mark.parametrize("chunks", [(3, 8), (7, 36), (100, 100)])
@pytest.mark.parametrize("kind", ["forward", "reverse", "symmetric"])
def test_loss_and_gradients_are_the_formulas(kind: Any, chunks: tuple[int, int]) -> None:
    given = inputs()
    for T, alpha in ((1.0, 1.0), (2.5, 0.3), (1.7, 0.0)):

        def chunked(student: Any, T: float = T, alpha: float = alpha) -> Tensor:
            return zf.distillation_loss(
                student, given["teacher"], given["targets"], temperature=T, alpha=alpha,
                divergence=kind, token_chunk=chunks[0], vocabulary_chunk=chunks[1],
            )  # fmt: skip

        def whole(student: Any, T: float = T, alpha: float = alpha) -> Tensor:
            return plain(student, given["teacher"], given["targets"], T, alpha, kind)

        for student in (given["student"], given["student"][0] @ given["student"][1].T):
            grads, value = zf.grad_and_value(chunked)(student)
            want, wanted = zf.grad_and_value(whole)(student)
            # Float64: the issue is the order of sums, far below the 1e-6 that is asked.
            torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(tree.leaves(grads), tree.leaves(want), rtol=1e-8, atol=1e-12)


def test_teachers_of_every_kind() -> None:
    given = inputs()
    hidden, head = given["teacher"]
    q = zf.quantize(head)
    for teacher, same in (
        (hidden @ head.T, (hidden, head)),
        ((hidden, q), (hidden, zf.dequantize(q))),
    ):
        found = zf.distillation_loss(given["student"], teacher, token_chunk=4, vocabulary_chunk=9)
        torch.testing.assert_close(found, plain(given["student"], same, None, 1, 1, "forward"))
    masked = (hidden @ head.T).masked_fill(torch.arange(VOCABULARY) % 3 == 0, -torch.inf)
    grads = zf.grad(lambda s: zf.distillation_loss(s, masked, vocabulary_chunk=5))(given["student"])
    assert all(x.isfinite().all() for x in grads)


def test_no_gradient_goes_to_the_teacher() -> None:
    given = inputs()
    grads = zf.grad(lambda t: zf.distillation_loss(given["student"], t))(given["teacher"])
    assert all(not x.any() for x in grads)


def test_autograd_jit_vmap_and_second_derivatives() -> None:
    given = inputs()

    def loss(hidden: Tensor) -> Tensor:
        return zf.distillation_loss(
            (hidden, given["student"][1]), given["teacher"], token_chunk=4, vocabulary_chunk=16,
            divergence="reverse",
        )  # fmt: skip

    def whole(hidden: Tensor) -> Tensor:
        return plain((hidden, given["student"][1]), given["teacher"], None, 1, 1, "reverse")

    hidden = given["student"][0]
    want = zf.grad(whole)(hidden)
    leaf = hidden.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(leaf.grad, want)
    torch.testing.assert_close(zf.jit(zf.grad(loss))(hidden), want)
    many = torch.stack([hidden, 2 * hidden])
    torch.testing.assert_close(
        torch.func.vmap(zf.grad(loss))(many), torch.stack([want, zf.grad(whole)(2 * hidden)])
    )

    def bend(f: Any) -> Tensor:
        return zf.grad(lambda x: zf.grad(f)(x).square().sum())(hidden)

    torch.testing.assert_close(bend(loss), bend(whole))


def test_a_step_that_distils_is_a_step() -> None:
    config = gpt.Config(vocabulary=VOCABULARY, length=12, width=16, layers=1)
    large = gpt.Config(vocabulary=VOCABULARY, length=12, width=32)
    teacher = tree.map(Tensor.double, gpt.init(large, seed=1))
    tokens = torch.arange(48).view(4, 12) * 5 % VOCABULARY

    def loss(params: Any, tokens: Tensor) -> Tensor:
        said = gpt.apply(teacher, tokens, large)
        return zf.distillation_loss(gpt.apply(params, tokens, config), said, vocabulary_chunk=16)

    params = tree.map(Tensor.double, gpt.init(config))
    runs = []
    for dp in (1, 2):
        init, step = zf.train_step(loss, zf.adamw(1e-2), zf.Mesh(dp=dp), stage=3 if dp > 1 else 0)
        state = init(params)
        values = []
        for _ in range(2):
            state, metrics = step(state, tokens)
            values.append(metrics["loss"])
        runs.append(torch.stack(values))
    assert runs[0][1] < runs[0][0]
    torch.testing.assert_close(runs[0], runs[1])


def test_memory_is_a_quarter_of_the_formulas() -> None:
    student = (normal(256, 16, seed=0).float(), normal(2003, 16, seed=1).float())
    teacher = (normal(256, 24, seed=2).float(), normal(2003, 24, seed=3).float())
    given = [*student, *teacher]

    def chunked(student: Any) -> Tensor:
        return zf.distillation_loss(student, teacher, token_chunk=64, vocabulary_chunk=256)

    taken = peak(lambda: zf.grad(chunked)(student), given)
    whole = peak(
        lambda: zf.grad(lambda s: plain(s, teacher, None, 1, 1, "forward"))(student), given
    )
    assert taken < whole / 4
    assert taken < 256 * 2003 * 4 / 2  # no logits of one model either


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"alpha": 0.5, "targets": None}, "give its targets"),
        ({"divergence": "js"}, "divergence is 'js'"),
        ({"token_chunk": 0}, "token_chunk=0"),
        ({"teacher": torch.ones(2, 5, 36)}, "vocabulary of 37, the teacher's"),
        ({"teacher": (torch.ones(2, 5, 3), torch.ones(37, 4))}, "teacher: hidden states"),
        ({"targets": torch.zeros(10)}, r"targets of shape \(10,\)"),
    ],
)
def test_what_does_not_fit(changes: Any, message: str) -> None:
    given = inputs() | changes
    with pytest.raises(ValueError, match=message):
        zf.distillation_loss(given.pop("student"), given.pop("teacher"), **given)
