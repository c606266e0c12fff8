"""What a set-up takes at least, by arithmetic: no plan of it can be below.

Memory: float32 parameters and Adam's moments, 12 bytes a parameter, over ``dp`` from stage 1 on;
the copies that are computed with, or the gradients, whichever are larger (ZeRO, arXiv 1910.02054,
section 3.1); and what is kept for the backward, 2 bytes a value of the residual stream and block
with recomputation, and 20 without (34 by arXiv 2205.05198, equation 2, with dropout). Time: 6
operations a parameter and token, 8 with recomputation, at the hardware's efficiency, and the
pipeline's fill and drain.
"""

import torch

from ..hardware import Hardware
from ..naming import size_of
from .setups import Setup

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def least_memory(setup: Setup) -> float:
    """Bytes on the rank that needs the most, at the least."""
    config = setup.config
    table = config.vocabulary * config.width
    outside = table * (1 if config.tied else 2) + (config.length + 2) * config.width
    block = (config.parameters - outside) / config.layers
    found = []
    for stage, layers in enumerate(setup.stage_layers):
        own = layers * block + (table if stage in (0, setup.pp - 1) else 0)
        under_way = min(setup.pp - stage, setup.microbatches)
        found.append(_least_of(setup, own / setup.tp, block / setup.tp, layers * under_way))
    return max(found)


def _least_of(setup: Setup, own: float, block: float, kept: int) -> float:
    """The same of one stage: its parameters, those of a block, and the blocks of all micro-batches
    that are under way."""
    config, away = setup.config, dict(setup.offload)
    cut = own / setup.dp if setup.stage else own
    states = 0.0
    if "parameters" not in away:
        states += 4 * cut
    if "optimizer state" not in away:
        states += 8 * cut
    width = 4 if setup.dtype == "fp32" else 2
    copies = 0.0 if setup.stage == 0 and width == 4 else width * own
    if setup.stage == 3:
        copies = width * block
    update = 4 * cut if "gradients" not in away else 0.0
    stream = setup.batch * config.length * config.width / setup.tp
    if setup.remat and setup.stage == 3 and setup.pp > 1:
        kept = 1  # whole stages are computed again
    activations = stream * kept * (width if setup.remat else 10 * width)
    return states + max(copies + activations, update)


def least_seconds(setup: Setup, hardware: Hardware) -> float:
    """Seconds of a step, at the least.

    Raises:
        ValueError: for a dtype that the hardware has no figure for.
    """
    tokens = setup.sequences * setup.config.length
    operations = (8 if setup.remat else 6) * setup.config.parameters * tokens / setup.ranks
    speed = hardware.flops_of(_DTYPES[setup.dtype]) * hardware.efficiency
    fill = (setup.pp - 1) / setup.microbatches
    own = setup.config.parameters / (setup.tp * setup.pp)
    times = setup.microbatches * 3 if setup.stage == 3 else 2
    apart = setup.dp * setup.tp
    network = hardware.link if apart <= hardware.node else hardware.network
    sent = times * 3 * own * (setup.dp - 1) / setup.dp / network if setup.dp > 1 else 0.0
    return max(operations / speed, sent) + operations / speed * fill


def why_not(setup: Setup, hardware: Hardware) -> str | None:
    """Why a set-up cannot fit, by arithmetic alone; None if it may."""
    least = least_memory(setup)
    if least > hardware.memory:
        return f"takes {size_of(least)} at least"
    if setup.tp > hardware.node:
        return f"tp {setup.tp} crosses nodes of {hardware.node}"
    return None
