"""One rank of ``slow_network.py``: it trains as it is told on standard input.

Each line of input is a number of steps; the answer is a line of JSON. The environment says who the
rank is, as under torchrun; the arguments are the contestant's name, ``tiny`` or ``full``, and the
interface whose bytes count.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

import zero_fn as zf
from zero_fn.models import gpt

from .network import sent_over
from .peers import CONFIG, TINY
from .peers_contestants import (
    DECAY,
    LEARNING_RATE,
    Job,
    _adamw,
    _join,
    _module_job,
    batch,
)

MARK = "answer: "  # what libraries print goes to the same place
WARM = 3  # steps before anything is timed: the warm-up of the 1-bit optimizers is shorter


def bf16_on_gloo(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """torch's hook by another name: torch refuses it without NCCL, though Gloo sums bf16."""
    return default_hooks.bf16_compress_hook(state, bucket)


def ddp(config: gpt.Config, hook: str | None = None) -> Job:
    """DistributedDataParallel, whose gradients travel through one of torch's hooks."""
    from torch.nn.parallel import DistributedDataParallel

    _join()

    def wrap(model: nn.Module) -> Any:
        # PowerSGD in one bucket: with more, Gloo's ranks start its sums in unlike orders.
        size = 1024 if hook == "PowerSGD" else None
        wrapped = DistributedDataParallel(model, bucket_cap_mb=size)
        if hook == "bf16":
            wrapped.register_comm_hook(None, bf16_on_gloo)
        elif hook == "PowerSGD":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=4, start_powerSGD_iter=2
            )
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        return wrapped, _adamw(wrapped.parameters())

    return _module_job(config, wrap)


def ours(config: gpt.Config, optimizer: Any) -> Job:
    """A step of this library; its bytes are those of the phase after the warm-up."""
    ranks = int(os.environ["WORLD_SIZE"])

    def loss_fn(params: Any, batch: Any) -> Tensor:
        return gpt.loss(params, batch, config)

    init, step = zf.train_step(loss_fn, optimizer, zf.Mesh(dp=ranks))
    state = [init(gpt.init(config))]

    def run(number: int) -> float:
        state[0], metrics = step(state[0], batch(config, number, ranks))
        return float(metrics["loss"])

    for number in range(WARM):
        run(number)
    program = step.trace(state[0], batch(config, 0, ranks))  # type: ignore[attr-defined]
    return Job(run, sum(found.bytes_sent for found in program.collectives()))


BUILD: dict[str, Callable[[gpt.Config], Job]] = {
    "DDP": ddp,
    "DDP, bf16 hook": lambda config: ddp(config, "bf16"),
    "DDP, PowerSGD hook": lambda config: ddp(config, "PowerSGD"),
    "zero_fn adamw": lambda config: ours(config, zf.adamw(LEARNING_RATE, weight_decay=DECAY)),
    "zero_fn onebit_adam": lambda config: ours(
        config, zf.onebit_adam(LEARNING_RATE, WARM - 1, weight_decay=DECAY)
    ),
}


def main() -> None:
    name, size, interface = sys.argv[1:]
    torch.set_num_threads(1)
    job = BUILD[name](TINY if size == "tiny" else CONFIG)
    for number in range(WARM):
        job.step(number)
    _answer(wire=job.wire)
    done = WARM
    for line in sys.stdin:
        steps = int(line)
        dist.barrier()
        before, start = sent_over(interface), time.perf_counter()
        for number in range(done, done + steps):
            job.step(number)
        seconds = (time.perf_counter() - start) / steps
        done += steps
        dist.barrier()  # so that what the peer still waits for has left
        _answer(seconds=seconds, sent=(sent_over(interface) - before) / steps)


def _answer(**what: Any) -> None:
    print(MARK + json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
