"""The contestants of ``peers.py``: each makes a function that runs one training step of one rank.

All train the same GPT from the same weights with the same batches and AdamW; they run inside the
ranks of a pool. ``BUILD`` names them; the peers' libraries are imported when one is built.
"""

import gc
import importlib
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import zero_fn as zf
from zero_fn.models import gpt

ROWS, BATCHES = 2, 8
LEARNING_RATE, DECAY = 1e-3, 0.01


class Job(NamedTuple):
    """One contestant on one rank.

    Attributes:
        step: the number of a batch to the loss over all ranks' rows.
        wire: bytes a rank sends in a step by the ring formulas; None where nobody counts them.
    """

    step: Callable[[int], float]
    wire: int | None


class GPT(nn.Module):
    """The model of ``zero_fn.models.gpt`` as torch users write it."""

    def __init__(self, config: gpt.Config, params: gpt.Params) -> None:
        super().__init__()
        self.tokens = nn.Embedding.from_pretrained(params["tokens"], freeze=False)
        self.positions = nn.Embedding.from_pretrained(params["positions"], freeze=False)
        self.blocks = nn.ModuleList([Block(config, block) for block in params["blocks"]])
        self.norm = _norm(params["norm"])
        self.head = _linear({"weight": params["head"]})

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Block(nn.Module):
    def __init__(self, config: gpt.Config, params: gpt.Params) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1, self.norm2 = _norm(params["norm1"]), _norm(params["norm2"])
        self.qkv, self.out = _linear(params["qkv"]), _linear(params["out"])
        self.up, self.down = _linear(params["up"]), _linear(params["down"])

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


def _linear(weights: gpt.Params) -> nn.Linear:
    rows, columns = weights["weight"].shape
    layer = nn.Linear(columns, rows, bias="bias" in weights, device="meta")
    layer.weight = nn.Parameter(weights["weight"])
    if "bias" in weights:
        layer.bias = nn.Parameter(weights["bias"])
    return layer


def _norm(weights: gpt.Params) -> nn.LayerNorm:
    norm = nn.LayerNorm(len(weights["scale"]), device="meta")
    norm.weight, norm.bias = nn.Parameter(weights["scale"]), nn.Parameter(weights["shift"])
    return norm


def batch(config: gpt.Config, number: int, ranks: int) -> tuple[Tensor, Tensor]:
    """The global batch of a step."""
    generator = torch.Generator().manual_seed(number % BATCHES)
    shape = (ROWS * ranks, config.length + 1)
    rows = torch.randint(0, config.vocabulary, shape, generator=generator)
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _own(config: gpt.Config, number: int) -> tuple[Tensor, Tensor]:
    """This rank's rows of it."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    tokens, targets = batch(config, number, ranks)
    return tokens[rank * ROWS : (rank + 1) * ROWS], targets[rank * ROWS : (rank + 1) * ROWS]


def _mean(loss: Tensor) -> float:
    loss = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return float(loss)


def ours(config: gpt.Config, stage: int, compiler: Any) -> Job:
    ranks = int(os.environ["WORLD_SIZE"])
    mesh = zf.Mesh(dp=ranks)

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return gpt.loss(params, batch, config)

    optimizer = zf.adamw(LEARNING_RATE, weight_decay=DECAY)
    init, step = zf.train_step(loss_fn, optimizer, mesh, stage=stage, compiler=compiler)
    state = [init(gpt.init(config))]
    program = step.trace(state[0], batch(config, 0, ranks))  # type: ignore[attr-defined]
    wire = sum(found.bytes_sent for found in program.collectives())
    del program

    def run(number: int) -> float:
        state[0], metrics = step(state[0], batch(config, number, ranks))
        return float(metrics["loss"])

    return Job(run, wire)


def _module_job(config: gpt.Config, wrap: Callable[[nn.Module], Any]) -> Job:
    """A module, wrapped, and its optimizer: the loop that torch users write."""
    model, optimizer = wrap(GPT(config, gpt.init(config)))

    def run(number: int) -> float:
        loss = model(*_own(config, number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return _mean(loss)

    return Job(run, None)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=DECAY, fused=True)


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def alone(config: gpt.Config) -> Job:
    return _module_job(config, lambda model: (model, _adamw(model.parameters())))


def ddp(config: gpt.Config) -> Job:
    from torch.nn.parallel import DistributedDataParallel

    _join()

    def wrap(model: nn.Module) -> Any:
        wrapped = DistributedDataParallel(model)
        return wrapped, _adamw(wrapped.parameters())

    return _module_job(config, wrap)


def redundancy(config: gpt.Config) -> Job:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    _join()

    def wrap(model: nn.Module) -> Any:
        wrapped = DistributedDataParallel(model)
        settings: Any = {"lr": LEARNING_RATE, "weight_decay": DECAY, "fused": True}
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **settings)
        return wrapped, optimizer

    return _module_job(config, wrap)


def fsdp2(config: gpt.Config, reshard: bool) -> Job:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    _join()

    def wrap(model: nn.Module) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        blocks: Any = model.blocks
        for block in blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
        return model, _adamw(model.parameters())

    return _module_job(config, wrap)


def deepspeed(config: gpt.Config, stage: int) -> Job:
    import deepspeed as ds  # type: ignore[import-not-found]

    _join()
    model = GPT(config, gpt.init(config))
    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": LEARNING_RATE, "torch_adam": True, "weight_decay": DECAY},
        },
        "zero_allow_untested_optimizer": True,
    }
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=settings)

    def run(number: int) -> float:
        loss = engine(*_own(config, number))
        engine.backward(loss)
        engine.step()
        return _mean(loss)

    return Job(run, None)


BUILD: dict[str, Callable[[gpt.Config], Job]] = {
    "module + fused AdamW": alone,
    "DDP + fused AdamW": ddp,
    "ZeroRedundancyOptimizer": redundancy,
    "FSDP2, kept": lambda config: fsdp2(config, False),
    "FSDP2, resharded": lambda config: fsdp2(config, True),
    **{
        f"DeepSpeed ZeRO {stage}": lambda config, stage=stage: deepspeed(config, stage)
        for stage in (1, 2, 3)
    },
    **{
        f"zero_fn stage {stage}, {compiler}": (
            lambda config, stage=stage, compiler=compiler: ours(config, stage, compiler)
        )
        for stage in range(4)
        for compiler in ("eager", "inductor")
    },
}


_LIBRARIES = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.nn.parallel",
)

# What a rank of a pool keeps between calls.
_jobs: dict[str, Job] = {}
_baseline = [0.0]


def build(name: str, config: gpt.Config, steps: int) -> tuple[list[float], int | None]:
    """Make a contestant on this rank; the losses of its first steps, and its bytes on the wire."""
    # Inductor's workers would take a core each from the ranks that are measured.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    for library in _LIBRARIES + ("deepspeed",) * name.startswith("DeepSpeed"):
        importlib.import_module(library)  # what code takes is not what a step takes
    _baseline[0] = _anonymous()
    _jobs[name] = BUILD[name](config)
    losses = [_jobs[name].step(number) for number in range(steps)]
    gc.collect()
    return losses, _jobs[name].wire


def timed(name: str, first: int, steps: int) -> float:
    """The seconds of one step, averaged over some."""
    job = _jobs[name]
    start = time.perf_counter()
    for number in range(first, first + steps):
        job.step(number)
    return (time.perf_counter() - start) / steps


def resident(name: str, first: int, steps: int) -> float:
    """The most anonymous memory in MiB, over the baseline after import, while steps run."""
    most, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            most[0] = max(most[0], _anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for number in range(first, first + steps):
            _jobs[name].step(number)
    finally:
        done.set()
        watcher.join()
    return most[0] - _baseline[0]


def _anonymous() -> float:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon"))
