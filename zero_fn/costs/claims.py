"""What DeepSpeed is known for, held against plans: what fits, what does not, and on what it hangs.

    zero-fn plan --claims

A plan is of this library's step, traced. Where it says more than the claim did, the reason is in
the row's note: gradients are float32 here where DeepSpeed's were float16, say.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..hardware import hardware
from ..kernels import Layout
from ..mesh import Mesh
from ..models import gpt
from ..naming import suggestion
from ..optim import adamw, onebit_adam
from ..planning import Plan, eval_shape, plan
from ..train import train_step
from .presets import model
from .search import HOST
from .setups import Setup, plan_setup

V100 = hardware("v100-32gb")


class Row(NamedTuple):
    """One line of a claim.

    Attributes:
        what: the set-up.
        found: what a plan says, with its unit.
        holds: whether it fits, or is as much as claimed; None: neither, it is there to compare.
    """

    what: str
    found: str
    holds: bool | None


@dataclass(frozen=True)
class Claim:
    """Something that was said, and how it is looked at here.

    Attributes:
        name: what to call it.
        said: the claim.
        source: who said it.
        hangs_on: the assumption behind what holds.
        rows: makes the rows; takes seconds.
    """

    name: str
    said: str
    source: str
    hangs_on: str
    rows: Callable[[], Iterator[Row]]


def _memory(*setups: Setup, device: Any = V100) -> Iterator[Row]:
    for setup in setups:
        found = plan_setup(setup, device)
        host = f", {found.host / 1e9:.0f} GB on the host" if found.host else ""
        bubble = f", bubble {found.bubble:.0%}" if found.bubble else ""
        amount = f"{found.peak.bytes / 1e9:.1f} of {device.memory / 1e9:.0f} GB"
        scale = {True: "", False: ", no dynamic loss scale"}[setup.loss_scale]
        yield Row(f"{setup}{scale}", amount + host + bubble, found.fits)


def trillion() -> Iterator[Row]:
    """10¹² parameters over 800 V100s."""
    config = model("1t").config
    one = Setup(config, 0, tp=8, pp=100, microbatches=256, remat=True, dtype="fp16")
    wide = Setup(
        model("1t-wide").config, 1, dp=10, tp=8, pp=10, microbatches=10, remat=True, dtype="fp16"
    )
    yield from _memory(one, wide, dataclasses.replace(wide, stage=3))


def thirteen() -> Iterator[Row]:
    """13 × 10⁹ parameters on one V100, with the host of a machine to itself."""
    alone = dataclasses.replace(V100, node=1, host=1536e9, host_bandwidth=256e9)
    there = Setup(
        model("13b").config, 0, remat=True, dtype="fp16", loss_scale=False, clip=False, offload=HOST
    )
    yield from _memory(dataclasses.replace(there, offload=()), there, device=alone)


def hundred() -> Iterator[Row]:
    """10¹¹ parameters on 400 V100s, tensor slices of 16."""
    setup = Setup(model("100b").config, 1, dp=25, tp=16, batch=8, remat=True, dtype="fp16")
    yield from _memory(dataclasses.replace(setup, stage=0), setup)


def turing() -> Iterator[Row]:
    """Turing-NLG on 256 V100s, tensor slices of 4."""
    setup = Setup(model("turing-nlg-17b").config, 1, dp=64, tp=4, batch=4, remat=True, dtype="fp16")
    yield from _memory(dataclasses.replace(setup, stage=0), setup)


def sequences(longest: int = 1 << 18) -> Iterator[Row]:
    """The longest sequence that one V100 trains a GPT-2 (12 layers of width 768) of bytes with."""
    lengths = [1 << power for power in range(14, longest.bit_length())]
    found = {}
    for name, attention in (
        ("scores in memory", _materialised),
        ("dense, in blocks", "dense"),
        ("block-sparse", None),
    ):
        for length in lengths:
            kind: Any = attention
            if attention is None:
                kind = Layout.bslongformer(length, block=128, attention="unidirectional")
            config = gpt.preset("gpt2", vocabulary=256, length=length, attention=kind)
            setup = Setup(config, remat=True, dtype="fp16")
            if not plan_setup(setup, V100).fits:
                break
            found[name] = length
    base = found["scores in memory"]
    for name, length in found.items():
        more = " or more" if length == lengths[-1] else ""
        times = f", {length / base:.0f} times" if length > base else ""
        holds = length >= 10 * base if times else None
        yield Row(f"attention: {name}", f"{length:,} tokens{more}{times}", holds)


def _materialised(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention that keeps its scores."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, -torch.inf).softmax(-1) @ v


def onebit(config: gpt.Config | None = None, ranks: int = 64) -> Iterator[Row]:
    """What a rank sends in a run of 1-bit Adam, 15 % of it in the warm-up."""
    config = config or dataclasses.replace(model("gpt2-124m").config, layers=4)
    plain = _sent(adamw(1e-4), config, ranks)
    warm = _sent(onebit_adam(1e-4, 10), config, ranks)
    compressed = _sent(onebit_adam(1e-4, 10), config, ranks, compressed=True)
    yield Row("AdamW, float32", f"{plain.bytes_sent / 1e6:.1f} MB a step", None)
    yield Row("1-bit Adam, warm-up", f"{warm.bytes_sent / 1e6:.1f} MB a step", None)
    yield Row("1-bit Adam, compressed", f"{compressed.bytes_sent / 1e6:.1f} MB a step", None)
    run = 0.15 * warm.bytes_sent + 0.85 * compressed.bytes_sent
    for dtype, bytes_ in (("float32", plain.bytes_sent), ("float16", plain.bytes_sent / 2)):
        times = bytes_ / run
        yield Row(f"a run, beside AdamW in {dtype}", f"{times:.1f} times fewer bytes", times >= 5)


def _sent(optimizer: Any, config: gpt.Config, ranks: int, compressed: bool = False) -> Plan:
    init, step = train_step(
        lambda params, batch: gpt.loss(params, batch, config),
        optimizer,
        Mesh(backend="simulated", dp=ranks).abstract(),
    )
    params, tokens = eval_shape(
        lambda: (gpt.init(config), torch.zeros(ranks, config.length, dtype=torch.int64))
    )
    state = init(params)
    if compressed:
        state = state._replace(opt_state=dataclasses.replace(state.opt_state, phase="compressed"))
    return plan(step, state, (tokens, tokens))


CLAIMS = (
    Claim(
        "a trillion parameters",
        "10¹² parameters train on 800 V100s with 3D parallelism",
        "DeepSpeed, Microsoft Research, September 2020",
        "every rank's share of the model, 16 bytes a parameter, is 800 times smaller than the "
        "model: pp × tp = 800 and dp = 1, so ZeRO has nothing to cut, and recomputation. With "
        "dp 10 stage 1 does not fit, stage 3 does.",
        trillion,
    ),
    Claim(
        "13 billion on one GPU",
        "one V100 trains 13 × 10⁹ parameters with ZeRO-Offload",
        "arXiv 2101.06840",
        "parameters, gradients and moments live on the host, gradients leave as they appear, and "
        "the norm of all gradients is not needed before; the copies in half precision alone are "
        "26 GB. `zf.offload` places a state so, and its step is traced; none has run on a GPU.",
        thirteen,
    ),
    Claim(
        "100 billion",
        "10¹¹ parameters train on 400 V100s",
        "ZeRO, arXiv 1910.02054: ZeRO-100B",
        "tensor slices over 16 GPUs of one DGX-2, moments cut over the other 25, recomputation, "
        "sequence parallelism.",
        hundred,
    ),
    Claim(
        "Turing-NLG",
        "17 × 10⁹ parameters on V100s with tensor slices over 4 GPUs in place of 16",
        "Turing-NLG, Microsoft Research, February 2020",
        "stage 1 over the data-parallel ranks, recomputation.",
        turing,
    ),
    Claim(
        "sequences 10 times longer",
        "sparse attention trains on sequences 10 times longer",
        "DeepSpeed, Microsoft Research, September 2020",
        "the dense attention beside it keeps its scores in memory. One that computes them block by "
        "block, which came later, is as long by itself: what sparse attention then saves is time.",
        sequences,
    ),
    Claim(
        "1-bit Adam",
        "up to 5 times less communication",
        "arXiv 2102.02888",
        "15 % of the steps are the warm-up, and 85 % send a bit a value: 1 / (0.15 + 0.85 / 32) is "
        "5.7 beside float32, 1 / (0.15 + 0.85 / 16) is 4.9 beside float16, whose warm-up sends "
        "half as well. Scales and feedback's blocks are counted.",
        onebit,
    ),
)


def markdown(claim: Claim, rows: list[Row]) -> str:
    """A claim as a section of a page."""
    lines = [f"## {claim.name}", "", f"*{claim.said}* ({claim.source}).", ""]
    lines += ["| set-up | by the plan | |", "|---|---|---|"]
    told = {True: "yes", False: "no", None: ""}
    lines += [f"| {what} | {found} | {told[holds]} |" for what, found, holds in rows]
    return "\n".join([*lines, "", f"It hangs on this: {claim.hangs_on}", ""])


def report(name: str = "") -> int:
    """Print the claims whose names contain ``name`` as a page of markdown; the exit code.

    Raises:
        ValueError: if there is none.
    """
    chosen = [claim for claim in CLAIMS if name in claim.name]
    if not chosen:
        raise ValueError(f"no claim {name!r}; {suggestion(name, [c.name for c in CLAIMS])}")
    print("# What DeepSpeed is known for, as plans\n")
    print("Printed by `zero-fn plan --claims`. Nothing runs: programs are traced on sizes.\n")
    for claim in chosen:
        print(markdown(claim, list(claim.rows())), flush=True)
    return 0
