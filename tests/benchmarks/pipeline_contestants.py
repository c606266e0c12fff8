"""What runs on the ranks of ``pipeline.py``: stages that rest, and pipelines of a GPT."""

import gc
import importlib
import time
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zero_fn as zf
from zero_fn.models import gpt
from zero_fn.pipelining import run
from zero_fn.pipelining.schedule import Action
from zero_fn.pipelining.work import Work

from .peers_contestants import (
    _LIBRARIES,
    DECAY,
    LEARNING_RATE,
    Block,
    Job,
    _adamw,
    _anonymous,
    _baseline,
    _jobs,
    _linear,
    _norm,
)

ROWS = 2  # of a micro-batch


@torch.library.custom_op("zero_fn_benchmarks::rest", mutates_args=())
def rest(x: Tensor, seconds: float) -> Tensor:
    """The same values, after a while."""
    time.sleep(seconds)
    return x.clone()


@rest.register_fake
def _(x: Tensor, seconds: float) -> Tensor:
    return torch.empty_like(x)


class Resting(torch.autograd.Function):
    """x + w, which rests in its forward, in the gradient of x, and in that of w."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, seconds: float) -> Tensor:
        return rest(x + w, seconds)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.seconds = inputs[2]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return rest(grad, ctx.seconds), rest(grad.clone(), ctx.seconds), None


class Timed(Work):
    """Notes how long each action takes."""

    taken: ClassVar[list[tuple[Action, float]]] = []

    def compute(self, action: Action) -> None:
        start = time.perf_counter()
        super().compute(action)
        Timed.taken.append((action, time.perf_counter() - start))


class Span(NamedTuple):
    """One rank's step: its seconds, those in which it computes, and those of each action."""

    seconds: float
    busy: float
    actions: list[tuple[Action, float]]


def rest_spans(
    name: str, stages: int, microbatches: int, seconds: float, repeats: int
) -> list[Span]:
    """What a rank takes for each of some steps."""
    mesh = zf.Mesh(pp=2)
    run.Work = Timed  # type: ignore[misc]

    def stage(w: Tensor, carry: Any, x: Tensor) -> Tensor:
        # the first stage's input has a gradient too, so that its I rests like the others'
        entering = w * 0 if carry is None else carry
        return Resting.apply(entering, w, seconds)

    def last(w: Tensor, carry: Any, x: Tensor) -> Tensor:
        return stage(w, carry, x).mean()

    pipe = zf.pipeline([*[stage] * (stages - 1), last], microbatches, name)
    params = zf.spmd(pipe.place, mesh)(tuple(torch.ones(1000) for _ in range(stages)))
    step = zf.spmd(pipe, mesh)
    batch = torch.zeros(microbatches)
    step(params, batch)
    spans = []
    for _ in range(repeats):
        dist.barrier()
        Timed.taken.clear()
        start = time.perf_counter()
        step(params, batch)
        taken = time.perf_counter() - start
        spans.append(Span(taken, sum(x for _, x in Timed.taken), list(Timed.taken)))
    return spans


def batch(config: gpt.Config, number: int, microbatches: int) -> tuple[Tensor, Tensor]:
    """The batch of a step."""
    generator = torch.Generator().manual_seed(number % 8)
    shape = (ROWS * microbatches, config.length + 1)
    rows = torch.randint(0, config.vocabulary, shape, generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


class Part(nn.Module):
    """A stage as torch users write it."""

    def __init__(self, config: gpt.Config, params: gpt.Params) -> None:
        super().__init__()
        self.entry = "tokens" in params
        if self.entry:
            self.tokens = nn.Embedding.from_pretrained(params["tokens"], freeze=False)
            self.positions = nn.Embedding.from_pretrained(params["positions"], freeze=False)
        self.blocks = nn.ModuleList([Block(config, block) for block in params["blocks"]])
        self.exit = "head" in params
        if self.exit:
            self.norm, self.head = _norm(params["norm"]), _linear({"weight": params["head"]})

    def forward(self, x: Tensor) -> Tensor:
        if self.entry:
            x = self.tokens(x) + self.positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) if self.exit else x


def torchs(config: gpt.Config, name: str, stages: int, microbatches: int) -> Job:
    from torch.distributed import pipelining as tp

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    homes = zf.pipeline_schedule(name, ranks, microbatches).placement
    cut = gpt.split_params(gpt.init(config), config, stages)
    parts = {s: Part(config, cut[s]) for s in range(stages) if homes[s] == rank}
    made = [tp.PipelineStage(part, s, stages, torch.device("cpu")) for s, part in parts.items()]

    def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    kind = {
        "gpipe": tp.ScheduleGPipe,
        "1f1b": tp.Schedule1F1B,
        "interleaved": tp.ScheduleInterleaved1F1B,
        "zbv": tp.ScheduleZBVZeroBubble,
    }[name]
    given: Any = made if stages > ranks else made[0]
    schedule: Any = kind(given, microbatches, loss_fn=loss_fn)
    optimizer = _adamw([p for part in parts.values() for p in part.parameters()])

    def one(number: int) -> float:
        tokens, targets = batch(config, number, microbatches)
        losses: list[Tensor] = []
        here = homes[stages - 1] == rank
        schedule.step(
            *([tokens] if 0 in parts else []),
            target=targets if here else None,
            losses=losses if here else None,
            return_outputs=False,
        )
        optimizer.step()
        optimizer.zero_grad()
        total = torch.stack(losses).mean().detach() if here else torch.zeros(())
        dist.all_reduce(total)
        return float(total)

    return Job(one, None)


def ours(config: gpt.Config, name: str, stages: int, microbatches: int, jitted: bool) -> Job:
    mesh = zf.Mesh(pp=2)
    pipe = zf.pipeline(gpt.stages(config, stages), microbatches, name)
    optimizer = zf.adamw(LEARNING_RATE, weight_decay=DECAY)

    def init(params: Any) -> zf.TrainState:
        params = pipe.place(params)
        return zf.TrainState(params, optimizer.init(params))

    def update(state: zf.TrainState, grads: Any) -> zf.TrainState:
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return zf.TrainState(zf.apply_updates(state.params, updates), opt_state)

    def whole(state: zf.TrainState, batch: Any) -> Any:
        grads, value = pipe(state.params, batch)
        return update(state, grads), value

    gradient = zf.spmd(pipe, mesh)
    updated = zf.jit(zf.spmd(update, mesh, batch="replicated"), donate=0)
    together = zf.jit(zf.spmd(whole, mesh), donate=0)
    state = [zf.spmd(init, mesh)(gpt.split_params(gpt.init(config), config, stages))]

    def one(number: int) -> float:
        data = batch(config, number, microbatches)
        if jitted:
            state[0], value = together(state[0], data)
        else:
            grads, value = gradient(state[0].params, data)
            state[0] = updated(state[0], grads)
        return float(value)

    return Job(one, None)


def build(
    contestant: str, config: gpt.Config, stages: int, microbatches: int, steps: int
) -> list[float]:
    """Make a contestant on this rank; the losses of its first steps."""
    for library in (*_LIBRARIES, "torch.distributed.pipelining"):
        importlib.import_module(library)  # what code takes is not what a step takes
    _baseline[0] = _anonymous()
    whose, name = contestant.removesuffix(", jit").split()
    if whose == "torch":
        _jobs[contestant] = torchs(config, name, stages, microbatches)
    else:
        jitted = contestant.endswith("jit")
        _jobs[contestant] = ours(config, name, stages, microbatches, jitted)
    losses = [_jobs[contestant].step(number) for number in range(steps)]
    gc.collect()
    return losses
