"""What composes with what: each pair of a step's features tried, and the page of it.

    python -m tests.combinations > docs/combinations.md

A feature either leaves the numbers alone (a stage, slices, a pipeline, ...) or changes them in its
own way (clipping, a low precision, ...). A pair composes if its step, on simulated ranks, trains to
the same parameters as the step with those of its features that change the numbers, alone.
"""

import functools
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_fn as zf
from zero_fn import tree

STEPS = 4
ROWS, WIDTH, HIDDEN = 8, 6, 10
# Of one kind; two of a kind are no pair.
KINDS = (
    ("stage 1", "stage 2", "stage 3"),
    ("bf16", "fp16, loss scale"),
    ("1-bit Adam", "int8 gradients", "delayed update"),
    ("recomputation", "activation offload"),
    ("accumulation",),
    ("clipping",),
    ("tensor slices",),
    ("pipeline",),
    ("state on disk",),
    ("frozen leaves",),
    ("buffers",),
    ("dropout",),
    ("check_finite",),
)
FEATURES = tuple(itertools.chain(*KINDS))
PAIRS = tuple(
    (a, b)
    for a, b in itertools.combinations(FEATURES, 2)
    if not any(a in kind and b in kind for kind in KINDS)
)
CHANGING = {
    "bf16", "fp16, loss scale", "1-bit Adam", "int8 gradients", "delayed update", "clipping",
    "frozen leaves", "dropout",
}  # fmt: skip
Features = frozenset[str]


class Late(Exception):
    """A refusal that came at the first step, and not when the step was built."""


def compared_with(features: Features) -> Features:
    """The features that change the numbers; each micro-batch has a dropout mask of its own."""
    own = {"accumulation"} if {"dropout", "accumulation"} <= features else set()
    return features & (CHANGING | own)


def params() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"up": (HIDDEN, WIDTH), "down": (1, HIDDEN)}
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64) / 3
        for name, shape in shapes.items()
    }


def batches() -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(1)
    xs = torch.randn(STEPS, ROWS, WIDTH, generator=g, dtype=torch.float64)
    return [(x, 3 * x.sin().sum(1, keepdim=True)) for x in xs]


def _loss_fn(features: Features) -> Any:
    """A loss of two matrices, or the pipeline of its two stages."""
    axis = "tp" if "tensor slices" in features else None

    def first(up: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(zf.column_linear(x, up, axis=axis) if axis else x @ up.mT)

    def last(down: Tensor, hidden: Tensor, y: Tensor) -> Tensor:
        out = zf.row_linear(hidden, down, axis=axis) if axis else hidden @ down.mT
        return (out - y).square().mean()

    inner = first
    if "recomputation" in features:
        inner = zf.remat(first)
    if "activation offload" in features:
        inner = zf.activation_offload(first)
    if "pipeline" in features:
        stages = [
            lambda p, _, batch: inner(p["up"], batch[0]),
            lambda p, carry, batch: last(p["down"], carry, batch[1]),
        ]
        return zf.pipeline(stages, 2)

    def loss(p: Any, batch: Any, **given: Any) -> Any:
        x, y = batch
        if "dropout_key" in given:
            x = zf.random.dropout(x, 0.5, given["dropout_key"])
        value = last(p["down"], inner(p["up"], x), y)
        if "buffers" in given:
            return value, {"calls": given["buffers"]["calls"] + 1}
        return value

    return loss


def _built(features: Features) -> tuple[Any, Any, Any]:
    """The state before the first step, the step, and the mesh."""
    sizes = {"pp": "pipeline" in features, "dp": True, "tp": "tensor slices" in features}
    mesh = zf.Mesh(**{name: 2 for name, has in sizes.items() if has})
    optimizer: Any = zf.sgd(0.1, momentum=0.9)
    if "1-bit Adam" in features:
        optimizer = zf.onebit_adam(0.02, freeze_step=2)
    if "delayed update" in features:
        optimizer = zf.delayed_update(optimizer, start=1)
    low = {"bf16": "bf16", "fp16, loss scale": "fp16"}
    compute = [dtype for name, dtype in low.items() if name in features]
    piped = "pipeline" in features
    rules: Any = {"*up": 0, "*down": 1}
    init, step = zf.train_step(
        _loss_fn(features),
        optimizer,
        mesh,
        stage=next((int(name[-1]) for name in KINDS[0] if name in features), 0),
        microbatches=2 if "accumulation" in features else 1,
        clip=0.05 if "clipping" in features else None,
        compress="int8" if "int8 gradients" in features else None,
        policy=zf.policy(params="float64", compute=compute[0]) if compute else None,
        loss_scale=zf.LossScale.static(128.0) if "fp16, loss scale" in features else None,
        slice_rules=rules if "tensor slices" in features else None,
        frozen=["*up"] if "frozen leaves" in features else (),
        buffers={"calls": torch.zeros(())} if "buffers" in features else (),
        dropout_key=zf.random.key(5) if "dropout" in features else None,
        check_finite="check_finite" in features,
    )
    whole = params()
    state = init(({"up": whole["up"]}, {"down": whole["down"]}) if piped else whole)
    return state, step, mesh


@functools.cache
def trained(features: Features) -> dict[str, Tensor]:
    """Whole parameters after some steps.

    Raises:
        Exception: what refuses the features when the step is built.
        Late: if they are refused after that.
    """
    state, step, mesh = _built(features)
    with tempfile.TemporaryDirectory() as folder:
        try:
            if "state on disk" in features:
                state = zf.offload(state, Path(folder) / "state")
            for batch in batches():
                state, _ = step(state, batch)
            state = zf.offload(state, "cpu")
        except Exception as error:
            raise Late(f"{type(error).__name__}: {error}") from error
    found = zf.gather_tree(state.params, mesh)
    if "frozen leaves" in features:
        found = zf.merge(found, zf.gather_tree(state.frozen, mesh))
    if "pipeline" in features:
        found = found[0] | found[1]
    return tree.map(torch.clone, found)


def outcome(a: str, b: str) -> str:
    """Empty where the pair composes, else the reason why it is refused.

    Raises:
        AssertionError: if it trains to something else.
        Late: if it is refused too late.
    """
    features = frozenset((a, b))
    try:
        found = trained(features)
    except (ValueError, TypeError) as error:
        return str(error)
    # rounding of 8 bits of mantissa, in other places by the way a batch is cut
    near = 3e-2 if features & {"bf16", "fp16, loss scale"} else 1e-9
    expected = trained(compared_with(features))
    torch.testing.assert_close(
        found, expected, rtol=near, atol=near, msg=lambda text: f"{a}, {b}: {text}"
    )
    return ""


def page() -> str:
    """The table of all pairs and the reasons, as markdown."""
    found = {pair: outcome(*pair) for pair in PAIRS}
    lines = [
        "# What composes",
        "",
        "Printed by `python -m tests.combinations`, which tries each pair of features of",
        "`zf.train_step`: `+` trains to the parameters that it has to, a number is the reason why",
        "the step is not built.",
        "",
    ]
    reasons: dict[str, int] = {}
    for reason in found.values():
        if reason:
            reasons.setdefault(reason, len(reasons) + 1)
    columns = FEATURES[:-1]
    lines += ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row, feature in enumerate(FEATURES[1:], 1):
        cells = []
        for column in columns:
            reason = found.get((column, feature))
            shown = "" if reason is None else str(reasons[reason]) if reason else "+"
            cells.append(shown if FEATURES.index(column) < row else "")
        lines.append(f"| {feature} | " + " | ".join(cells) + " |")
    lines += ["", *[f"{number}. {reason}" for reason, number in reasons.items()]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
