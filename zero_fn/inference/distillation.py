"""Distillation: a student's loss against a teacher, without the logits of either in memory.

With s and t the student's and the teacher's distributions at a temperature T (softmax(logits / T)),
a token's loss is (Hinton et al., arXiv 1503.02531)

    alpha T² D + (1 - alpha) cross-entropy of the student at T = 1

    forward    D = KL(t, s)                       covers all that the teacher says
    reverse    D = KL(s, t)                       keeps to what the teacher says (arXiv 2306.08543)
    symmetric  D = (KL(t, s) + KL(s, t)) / 2      Jeffreys' divergence

Given hidden states and heads, logits are made for some tokens and some of the vocabulary at a time,
and made again in the backward. Log-sums come first, sums of probabilities with them second.
"""

import math
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from ..autodiff import remat
from ..tree import Tensor
from .quantization import Quantized

Divergence = Literal["forward", "reverse", "symmetric"]
Logits = Tensor | tuple[Tensor, Any]
Part = tuple[Any, ...]  # logits, or hidden states and rows of a head, of some of the vocabulary

DIVERGENCES: tuple[Divergence, ...] = ("forward", "reverse", "symmetric")


def distillation_loss(
    student: Logits,
    teacher: Logits,
    targets: Tensor | None = None,
    *,
    temperature: float = 1.0,
    alpha: float | None = None,
    divergence: Divergence = "forward",
    ignore_index: int = -100,
    token_chunk: int = 256,
    vocabulary_chunk: int = 8192,
) -> Tensor:
    """The mean loss of a student's tokens against a teacher's distributions.

    >>> import torch, zero_fn as zf
    >>> hidden, head = torch.randn(10, 8), torch.randn(50, 8)
    >>> loss = zf.distillation_loss((hidden, head), torch.randn(10, 50), temperature=2.0)

    Args:
        student: logits (..., vocabulary), or (hidden (..., width), head (vocabulary, width)), whose
            logits are ``hidden @ head.T``.
        teacher: the same; of its own width, and no gradient goes to it. Its head may be quantised.
        targets: (...), token ids, for the cross-entropy; None: alpha is 1.
        temperature: what logits are divided by, in both distributions.
        alpha: the weight of the divergence; None: 1 without targets, else 0.5.
        divergence: ``"forward"``, ``"reverse"`` or ``"symmetric"``.
        ignore_index: targets of this value take their tokens out of both terms.
        token_chunk: tokens whose logits are in memory at once.
        vocabulary_chunk: logits of each token that are in memory at once.

    Returns:
        The loss, 0-dim, in nats a token; float32 for logits of half precision. Without a token that
        takes part, NaN.

    Raises:
        ValueError: for shapes that don't fit, and settings that mean nothing.
    """
    weight = _weight(alpha, targets)
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature is {temperature}; it is above 0")
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence is {divergence!r}; there are {', '.join(DIVERGENCES)}")
    if token_chunk < 1 or vocabulary_chunk < 1:
        raise ValueError(
            f"token_chunk={token_chunk}, vocabulary_chunk={vocabulary_chunk}; both are 1 or more"
        )
    vocabulary = _check_shapes(student, teacher, targets)
    tokens = _tokens(student)
    starts = range(0, vocabulary, vocabulary_chunk)
    if targets is None:
        targets = torch.zeros_like(tokens, dtype=torch.int64)
    taking = targets.reshape(-1) != ignore_index
    students = _parts(student, token_chunk, vocabulary_chunk)
    teachers = _parts(_detached(teacher), token_chunk, vocabulary_chunk)
    settings = _Settings(temperature, weight, divergence)
    losses = [
        _losses(own, other, goal, starts, settings)
        for own, other, goal in zip(
            students, teachers, targets.reshape(-1).split(token_chunk), strict=True
        )
    ]
    return torch.where(taking, torch.cat(losses), 0).sum() / taking.sum()


class _Settings(NamedTuple):
    temperature: float
    alpha: float
    divergence: Divergence


def _losses(
    student: list[Part], teacher: list[Part], targets: Tensor, starts: range, settings: _Settings
) -> Tensor:
    """The loss of each of some tokens."""
    scale = 1 / settings.temperature

    @remat
    def sums(part: Part, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sums at both temperatures, and the targets' logits, of a part of the vocabulary."""
        logits = _logits(part)
        place = targets - start
        mine = (place >= 0) & (place < logits.shape[-1])
        found = logits.gather(-1, torch.where(mine, place, 0).unsqueeze(-1)).squeeze(-1)
        return (logits * scale).logsumexp(-1), logits.logsumexp(-1), torch.where(mine, found, 0)

    own = [sums(part, start) for part, start in zip(student, starts, strict=True)]
    warm, plain, found = (torch.stack(x) for x in zip(*own, strict=True))
    loss = (1 - settings.alpha) * (plain.logsumexp(0) - found.sum(0))
    if settings.alpha == 0:
        return loss
    own_sum = warm.logsumexp(0)
    other_sum = torch.stack([(_logits(p) * scale).logsumexp(-1) for p in teacher]).logsumexp(0)

    def distances(part: Part, other: Part) -> Tensor:
        def of_student(part: Part, own_sum: Tensor) -> Tensor:
            s = _logits(part) * scale - own_sum.unsqueeze(-1)
            t = _logits(other) * scale - other_sum.unsqueeze(-1)
            if settings.divergence == "forward":
                return _terms(t, s)
            if settings.divergence == "reverse":
                return _terms(s, t)
            return (_terms(t, s) + _terms(s, t)) / 2

        return remat(of_student)(part, own_sum)

    distance = sum(distances(*pair) for pair in zip(student, teacher, strict=True))
    return loss + settings.alpha * settings.temperature**2 * distance


def _terms(p: Tensor, q: Tensor) -> Tensor:
    """A part of KL(p, q), from logarithms; a probability of 0 adds nothing."""
    chance = p.exp()
    return torch.where(chance == 0, 0, chance * (p - q)).sum(-1)


def _logits(part: Part) -> Tensor:
    logits = part[0] if len(part) == 1 else F.linear(*part)
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _parts(model: Logits, token_chunk: int, vocabulary_chunk: int) -> list[list[Part]]:
    """For each chunk of tokens the parts of the vocabulary."""
    if isinstance(model, Tensor):
        rows = model.reshape(-1, model.shape[-1]).split(token_chunk)
        return [[(part,) for part in row.split(vocabulary_chunk, -1)] for row in rows]
    hidden, head = model
    if isinstance(head, Quantized):
        values, scales = head.values.split(vocabulary_chunk), head.scales.split(vocabulary_chunk)
        rows = [Quantized(*pair, head.format) for pair in zip(values, scales, strict=True)]
    else:
        rows = head.split(vocabulary_chunk)
    chunks = hidden.reshape(-1, hidden.shape[-1]).split(token_chunk)
    return [[(chunk, part) for part in rows] for chunk in chunks]


def _detached(model: Logits) -> Logits:
    if isinstance(model, Tensor):
        return model.detach()
    hidden, head = model
    return hidden.detach(), head if isinstance(head, Quantized) else head.detach()


def _tokens(model: Logits) -> Tensor:
    """Something of the tokens' shape."""
    return (model if isinstance(model, Tensor) else model[0])[..., 0]


def _weight(alpha: float | None, targets: Tensor | None) -> float:
    if alpha is None:
        return 1.0 if targets is None else 0.5
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it is from 0, the cross-entropy alone, to 1")
    if targets is None and alpha < 1:
        raise ValueError(f"alpha={alpha} weighs the cross-entropy too; give its targets")
    return alpha


def _check_shapes(student: Logits, teacher: Logits, targets: Tensor | None) -> int:
    shapes, sizes = {}, {}
    for name, model in (("student", student), ("teacher", teacher)):
        if isinstance(model, Tensor):
            *shapes[name], sizes[name] = model.shape
            continue
        hidden, head = model
        if head.ndim != 2 or not hidden.ndim or hidden.shape[-1] != head.shape[1]:
            raise ValueError(
                f"{name}: hidden states of shape {tuple(hidden.shape)} and a head of shape "
                f"{tuple(head.shape)}; they are (..., width) and (vocabulary, width)"
            )
        *shapes[name], sizes[name] = *hidden.shape[:-1], head.shape[0]
    if shapes["student"] != shapes["teacher"] or sizes["student"] != sizes["teacher"]:
        raise ValueError(
            f"the student's tokens have the shape {tuple(shapes['student'])} and a vocabulary of "
            f"{sizes['student']}, the teacher's {tuple(shapes['teacher'])} and {sizes['teacher']}"
        )
    if targets is not None and list(targets.shape) != shapes["student"]:
        raise ValueError(
            f"targets of shape {tuple(targets.shape)} for tokens of shape "
            f"{tuple(shapes['student'])}"
        )
    if not math.prod(shapes["student"]) or not sizes["student"]:
        raise ValueError(f"no tokens: {tuple(shapes['student'])}, vocabulary {sizes['student']}")
    return sizes["student"]
