"""Adam's section of the GPU benchmark: 1e9 values in one buffer, and the leaf list of GPT-2 XL."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tests.benchmarks.gpu_results import Result, Setting
from tests.benchmarks.leaves import gpt2_shapes
from tests.benchmarks.timing import interleaved
from zero_fn.kernels import adam_run, fused_adamw, fused_adamw_
from zero_fn.kernels.floors import Floor, adamw_floor
from zero_fn.kernels.reference import adamw_leaf

LR, DECAY, COUNT = 1e-3, 0.1, 10
BF16 = torch.bfloat16

Lists = list[list[Tensor]]
Step = Callable[[Lists], object]  # on params, grads and moments


def section(setting: Setting) -> list[Result]:
    flat = [(5000,)] if setting.tiny else [(10**9,)]
    cases = {"one buffer": flat, "GPT-2 leaves": gpt2_shapes("tiny" if setting.tiny else "xl")}
    interpreted = mock.patch.object(adam_run, "_triton_takes", return_value=True)
    results = []
    with interpreted if setting.device == "cpu" else contextlib.nullcontext():
        for case, shapes in cases.items():
            results += _case(f"{case}, {sum(map(math.prod, shapes)):.3g}", shapes, setting)
    return results


def _case(case: str, shapes: Sequence[tuple[int, ...]], setting: Setting) -> list[Result]:
    lists = _lists(shapes, setting.device)
    sizes = [p.numel() for p in lists[0]]
    count = torch.tensor(COUNT, device=setting.device)
    lr = torch.tensor(LR, device=setting.device)
    seed = torch.tensor(1, device=setting.device)

    def ours(**more: Any) -> Step:
        return lambda four: fused_adamw_(*four, count, lr, weight_decay=DECAY, **more)

    def pure(four: Lists) -> object:
        return fused_adamw(*four, count, lr, weight_decay=DECAY)

    half = [[x.to(BF16) for x in lists[place]] for place in (0, 1)]
    copies = [torch.empty_like(x) for x in half[0]]
    mixed, low = [lists[0], half[1], *lists[2:]], [*half, *lists[2:]]
    steps: dict[str, tuple[Step, Lists, Floor]] = {
        "in place": (ours(), lists, adamw_floor(sizes)),
        "torch._fused_adamw_": (_torch_fused(lists, count), lists, adamw_floor(sizes)),
        "torch.optim, foreach": (_torch_foreach(lists), lists, adamw_floor(sizes)),
        "pure": (pure, lists, adamw_floor(sizes)),
        "bf16 gradients": (ours(), mixed, adamw_floor(sizes, grads=BF16)),
        "bf16 gradients, bf16 copy": (
            ours(copies=copies),
            mixed,
            adamw_floor(sizes, grads=BF16, copies=BF16),
        ),
        "bf16 parameters by chance": (
            ours(seed=seed),
            low,
            adamw_floor(sizes, params=BF16, grads=BF16),
        ),
    }
    errors = {name: _error(step, four) for name, (step, four, _) in steps.items()}
    runs = {name: _bound(step, four) for name, (step, four, _) in steps.items()}
    times = interleaved(runs, 1 if setting.tiny else 20, setting.device)
    return [
        Result(case, name, times[name], floor, errors[name])
        for name, (_, _, floor) in steps.items()
    ]


def _bound(step: Step, four: Lists) -> Callable[[], object]:
    return lambda: step(four)


def _lists(shapes: Sequence[tuple[int, ...]], device: str) -> Lists:
    generator = torch.Generator(device).manual_seed(0)

    def numbers() -> list[Tensor]:
        return [torch.rand(shape, device=device, generator=generator) for shape in shapes]

    return [numbers() for _ in range(4)]


def _torch_fused(lists: Lists, count: Tensor) -> Step:
    steps = [count.float() for _ in lists[0]]

    def step(four: Lists) -> None:
        torch._fused_adamw_(
            *four,
            [],
            steps,
            lr=LR,
            beta1=0.9,
            beta2=0.999,
            weight_decay=DECAY,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
        )

    return step


def _torch_foreach(lists: Lists) -> Step:
    optimizer = torch.optim.AdamW(lists[0], lr=LR, weight_decay=DECAY, foreach=True)
    for p, g, m, v in zip(*lists, strict=True):
        p.grad = g
        optimizer.state[p] = {"step": torch.tensor(COUNT - 1.0), "exp_avg": m, "exp_avg_sq": v}

    def step(four: Lists) -> None:
        for p in four[0]:
            optimizer.state[p]["step"].fill_(COUNT - 1.0)
        optimizer.step()

    return step


def _error(step: Step, four: Lists) -> float:
    """The largest relative error of new parameters and moments, on 1000 values of each leaf."""

    def sampled(lists: Sequence[Sequence[Tensor]]) -> Lists:
        return [[x.flatten()[:: max(1, x.numel() // 1000)].double() for x in xs] for xs in lists]

    before = sampled(four)
    new = step(four)
    after = sampled(four)
    if isinstance(new, tuple):  # a pure step
        updates, m, v = sampled(new)
        params = [p + update for p, update in zip(before[0], updates, strict=True)]
        after = [params, before[1], m, v]
    largest = 0.0
    number = torch.tensor(COUNT, device=four[0][0].device)
    rate = torch.tensor(LR, dtype=torch.float64, device=number.device)
    for old, leaf in zip(zip(*before, strict=True), zip(*after, strict=True), strict=True):
        update, one, two = adamw_leaf(*old, number, rate, 0.9, 0.999, 1e-8, DECAY, True)
        for got, want in ((leaf[0], old[0] + update), (leaf[2], one), (leaf[3], two)):
            # values are of order 1; relative to less than a hundredth, only roundings would show
            largest = max(largest, ((got - want).abs() / want.abs().clamp(min=0.01)).max().item())
    return largest
