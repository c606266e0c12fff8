"""Set-ups: a GPT, how it is divided over ranks, and the plan of one step of it.

Nothing here runs: each rank's program is traced on sizes, and large models from small traces, see
``extrapolation.py``.
"""

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..accounting import RING, Collective
from ..autodiff import remat
from ..hardware import Hardware
from ..mesh import Mesh
from ..models import gpt
from ..optim import adamw
from ..pipelining.builders import pipeline_schedule
from ..pipelining.partition import partition
from ..pipelining.run import pipeline
from ..pipelining.timeline import Timeline, timeline
from ..planning import Plan, eval_shape, plan, with_timeline
from ..planning.estimating import communication_of
from ..planning.residing import Place
from ..precision import LossScale, policy
from ..train import train_step
from .extrapolation import Span, extrapolated, summed

Offloaded = tuple[tuple[str, Place], ...]
DTYPES = ("fp32", "bf16", "fp16")
LAYERS = 3, 4  # numbers of blocks that are traced; below 3 there is no steady state
BLOCKS = 2, 3  # the same of one stage of a pipeline
PARTS = 3, 4  # numbers of micro-batches that are traced


@dataclass(frozen=True)
class Setup:
    """What is run.

    Attributes:
        config: the GPT's sizes.
        stage: ZeRO's, over ``dp``.
        dp: ranks that have different batches.
        tp: ranks that divide each layer, with sequence parallelism where they divide the length.
        pp: stages of a 1F1B pipeline.
        batch: sequences of one micro-batch on one data-parallel rank.
        microbatches: of a step.
        remat: whether each block is computed again in the backward; in a pipeline at stage 3 the
            whole stage, whose gathered parameters would be kept for each block else.
        dtype: of computing: ``"fp32"``, ``"bf16"`` or ``"fp16"``; what rests is float32.
        clip: whether gradients are clipped by their global norm.
        offload: parts of the memory and where they live, as in :func:`zero_fn.plan`.
        loss_scale: whether a loss in ``"fp16"`` has a dynamic scale. The update then waits until
            all gradients are known to be finite.

    Raises:
        ValueError: for sizes that are not positive, an unknown stage or dtype, or heads that ``tp``
            does not divide.
    """

    config: gpt.Config
    stage: int = 0
    dp: int = 1
    tp: int = 1
    pp: int = 1
    batch: int = 1
    microbatches: int = 1
    remat: bool = False
    dtype: str = "bf16"
    clip: bool = True
    offload: Offloaded = ()
    loss_scale: bool = True

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp", "batch", "microbatches"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it is 1 or more")
        if self.stage not in range(4):
            raise ValueError(f"stage is {self.stage!r}; it is 0, 1, 2 or 3")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}; it is one of {', '.join(DTYPES)}")
        if self.config.groups % self.tp:
            raise ValueError(f"tp={self.tp} does not divide the model's {self.config.groups} heads")
        if self.dtype == "fp32" and "parameters" in dict(self.offload):
            raise ValueError(
                "parameters on the host, and dtype='fp32' computes with them as they are; 'bf16' "
                "or 'fp16' computes with copies"
            )
        if self.pp > self.config.layers:
            raise ValueError(f"pp={self.pp} stages, and the model has {self.config.layers} layers")

    @property
    def ranks(self) -> int:
        """How many there are."""
        return self.dp * self.tp * self.pp

    @property
    def sequences(self) -> int:
        """Of one step, on all ranks."""
        return self.batch * self.microbatches * self.dp

    @property
    def stage_layers(self) -> tuple[int, ...]:
        """The blocks of each stage of the pipeline, the slowest stage as fast as can be."""
        return _stage_layers(self.config, self.pp)

    def __str__(self) -> str:
        axes = [f"{n} {getattr(self, n)}" for n in ("pp", "dp", "tp") if getattr(self, n) > 1]
        parts = f"{self.microbatches} × {self.batch}" if self.microbatches > 1 else f"{self.batch}"
        words = [
            " × ".join(axes) or "one rank",
            f"stage {self.stage}",
            self.dtype,
            f"batch {parts}",
        ]
        words += ["remat"] * self.remat
        return ", ".join(words + [f"{part} on {place}" for part, place in self.offload])


@functools.cache
def _stage_layers(config: gpt.Config, stages: int) -> tuple[int, ...]:
    block = 12.0 * config.width + config.length  # multiplications a token and channel
    cut = partition([0.0, *[block] * config.layers, float(config.vocabulary)], stages)
    ends = [(max(part.start, 1), min(part.stop, config.layers + 1)) for part in cut]
    return tuple([max(0, end - start) for start, end in ends])


def plan_setup(
    setup: Setup, hardware: Hardware | str | None = None, *, whole: bool = False
) -> Plan:
    """The plan of one step, of the rank that takes the most memory at its peak.

    Args:
        setup: what is run.
        hardware: what for, as in :func:`zero_fn.plan`.
        whole: trace the whole program, however large. The default traces models of a few blocks
            and micro-batches, and extrapolates, see ``extrapolation.py``.

    Returns:
        The plan. With a pipeline its timeline is that of all stages, each as long as it computes.

    Raises:
        ValueError: if small traces do not tell the memory; then ``whole`` does.
    """
    if setup.pp == 1:
        layers = Span(*LAYERS, setup.config.layers)
        parts = Span(*PARTS, setup.microbatches)
        make = functools.cache(functools.partial(_traced, setup, hardware, 0, 1))
        found = make(layers.wanted, parts.wanted) if whole else extrapolated(make, [layers, parts])
        return dataclasses.replace(found, label=str(setup))
    return _piped(setup, hardware, whole)


def _piped(setup: Setup, hardware: Hardware | str | None, whole: bool) -> Plan:
    """All stages' plans in one: the one with the highest peak, and the timeline of all."""
    plans: dict[tuple[bool, bool, int], Plan] = {}
    found = []
    for stage, layers in enumerate(setup.stage_layers):
        last = stage == setup.pp - 1
        # of two stages in the middle with as many blocks the earlier one holds more
        kind = stage == 0, last, layers
        if kind not in plans:
            plans[kind] = _stage_plan(setup, hardware, stage, layers, whole)
        found.append(plans[kind])
    worst = max(plans.values(), key=lambda plan: plan.peak.bytes)
    seconds = [plan.estimate.compute if plan.estimate else plan.flops for plan in found]
    busiest = max(found, key=lambda plan: plan.estimate.compute if plan.estimate else plan.flops)
    times = _times(setup, [second / setup.microbatches for second in seconds])
    # the memory of the rank that needs most, the time of the one that computes longest
    whole_step = dataclasses.replace(
        worst,
        label=str(setup),
        flops=busiest.flops,
        estimate=busiest.estimate,
        collectives=busiest.collectives,
    )
    return with_timeline(whole_step, times)


def _times(setup: Setup, seconds: list[float]) -> Timeline:
    """When each stage computes: a forward is a third of its time, or a quarter with remat."""
    share = 4 if setup.remat else 3
    return timeline(
        pipeline_schedule("1f1b", setup.pp, setup.microbatches),
        forward=[second / share for second in seconds],
        input_grad=[second * (share - 1) / share for second in seconds],
        weight_grad=0,
    )


def _stage_plan(
    setup: Setup, hardware: Hardware | str | None, stage: int, layers: int, whole: bool
) -> Plan:
    """The plan of one stage.

    Its memory follows the micro-batches that it has under way, which are as many as stages from
    here on; what it sends and computes follows the number of all. So a pipeline of 3 and one of 4
    such stages determine both, with as many micro-batches beyond them (2 are enough) as there are;
    at stage 3 each of the others would keep what is gathered for it in a bucket, 4 MB in all.
    """
    if whole:
        return _traced(setup, hardware, stage, setup.pp, layers, setup.microbatches)
    under_way = min(setup.pp - stage, setup.microbatches)
    more = min(setup.microbatches - under_way, 2)
    low = min(under_way, PARTS[0])
    far = under_way > PARTS[1]
    if not far:
        low = under_way
    before, last = int(stage > 0), stage == setup.pp - 1

    @functools.cache
    def traced(layers: int, place: int) -> Plan:
        after = low + place * far
        stages = before + (1 if last else max(after, 2))
        return _traced(setup, hardware, before, stages, layers, low + place + more)

    # a place on the line through the two pipelines, 0 and 1, and beyond
    spans = [Span(*BLOCKS, layers), Span(0, 1, under_way - low if far else 0)]
    memory = extrapolated(traced, spans)
    work = summed(traced, spans, [layers, setup.microbatches - low - more])
    mesh = {name: getattr(setup, name) for name in memory.mesh}
    sent = [_over(collective, setup) for collective in work.collectives]
    estimate = work.estimate
    if estimate is not None:
        assert work.hardware is not None
        times = communication_of(work.hardware, mesh, sent)
        estimate = estimate._replace(communication=times)
    return dataclasses.replace(
        memory,
        mesh=mesh,
        rest=work.rest,
        collectives=tuple(sent),
        flops=work.flops,
        estimate=estimate,
    )


def _over(collective: Collective, setup: Setup) -> Collective:
    """The collective over all stages, where fewer were traced."""
    if collective.axis != "pp":
        return collective
    sent = RING[collective.kind](collective.bytes_in, setup.pp)
    return collective._replace(bytes_sent=sent)


def _traced(
    setup: Setup,
    hardware: Hardware | str | None,
    stage: int,
    stages: int,
    layers: int,
    parts: int,
) -> Plan:
    """The plan of a stage among ``stages``, with so many blocks, by its whole program."""
    sizes = {"pp": stages, "dp": setup.dp, "tp": setup.tp}
    mesh = Mesh(
        backend="simulated",
        **{name: size for name, size in sizes.items() if size > 1 or name == "dp"},
    ).abstract(**({"pp": stage} if stages > 1 else {}))
    counts = [0 if place != stage else layers for place in range(stages)]
    config = dataclasses.replace(setup.config, layers=layers)
    functions: list[Callable[..., Tensor]] = [
        functools.partial(_stage, setup, config, place == 0, place == stages - 1)
        for place in range(stages)
    ]
    rows = setup.dp * setup.batch * parts
    if setup.stage == 3 and stages > 1 and setup.remat:
        functions = [remat(function) for function in functions]
    params, tokens = eval_shape(
        lambda: (_parameters(config, counts), torch.zeros(rows, config.length, dtype=torch.int64))
    )
    rules = gpt.rules(config, staged=stages > 1) if setup.tp > 1 else None
    loss: Any = pipeline(functions, parts) if stages > 1 else _loss(functions[0])
    init, step = train_step(
        loss,
        adamw(1e-4),
        mesh,
        stage=setup.stage,
        microbatches=1 if stages > 1 else parts,
        clip=1.0 if setup.clip else None,
        slice_rules=rules,
        policy=None if setup.dtype == "fp32" else policy(compute=setup.dtype),
        loss_scale=LossScale() if setup.dtype == "fp16" and setup.loss_scale else None,
    )
    state = init(params if stages > 1 else params[0])
    return plan(
        step,
        state,
        (tokens, tokens),
        hardware=hardware,
        label=str(setup),
        offload=dict(setup.offload),
    )


def _parameters(config: gpt.Config, counts: list[int]) -> tuple[gpt.Params, ...]:
    """The stages' parameters, with so many blocks each."""
    whole = gpt.init(config)
    stages: list[gpt.Params] = [{"blocks": whole["blocks"][:count]} for count in counts]
    stages[0] |= {name: whole[name] for name in ("tokens", "positions")}
    stages[-1] |= {name: whole[name] for name in ("norm", "head")}
    return tuple(stages)


def _loss(stage: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    return lambda params, batch: stage(params, None, batch)


def _stage(
    setup: Setup, config: gpt.Config, first: bool, last: bool, params: Any, carry: Any, batch: Any
) -> Tensor:
    """A stage of the GPT, each block recomputed in the backward where the set-up says so."""
    tokens, targets = batch
    axis = "tp" if setup.tp > 1 else None
    cut = gpt.Cut(axis, 1 if axis and config.length % setup.tp == 0 else None)
    x = gpt.embed(params, tokens, config, cut) if first else carry

    def block(weights: gpt.Params, x: Tensor) -> Tensor:
        return gpt.transform([weights], x, config, cut)

    each = setup.remat and not (setup.stage == 3 and setup.pp > 1)
    run = remat(block) if each else block
    for weights in params["blocks"]:
        x = run(weights, x)
    if not last:
        return x
    return gpt.cross_entropy(gpt.logits(params, x, cut), targets, config, cut)
