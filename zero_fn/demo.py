"""The demo: train a GPT on real text, sharded, and check it against a dense run.

The text is the source code of Python's own standard library, byte by byte, or any file or folder.
Everything it prints was measured in the run.
"""

import dataclasses
import functools
import math
import random
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

from . import tree
from .accumulation import accumulate
from .checkpoint import saved_steps
from .collectives import all_gather_invariant, pmean
from .compiler import jit
from .fitting import fit
from .inference.model_files import save_config
from .kernels import Layout
from .mesh import Mesh
from .models import gpt
from .optim import adamw, onebit_adam, warmup_cosine
from .pipelining.run import pipeline
from .ranks import spmd
from .resuming import Checkpoints
from .sharding import unshard
from .slicing import local_slices, slice_params
from .states import TrainState
from .train import train_step
from .tree import PyTree, Tensor

PEAK, WARMUP, DECAY, CLIP = 2e-3, 20, 0.1, 1.0
ROWS = 16  # sequences a step, over all ranks
CHECKED = 20  # steps that are run again, dense
TOLERANCE = 1e-4  # relative, of the losses of float32 runs that add in different orders
COMPRESSED_TOLERANCE = 0.05  # the same where gradients are rounded or cut
TEXT_LIMIT = 8 << 20  # bytes of text that are read
BLOCK = 16  # of sparse layouts: the models of the presets see no more than a few hundred bytes
ATTENTIONS = ("dense", "fixed", "variable", "bigbird", "bslongformer", "local_sliding_window")

Batch = tuple[Tensor, Tensor]


class Options(NamedTuple):
    """What the command line says."""

    dp: int = 4
    tp: int = 1
    pp: int = 1
    stage: int | None = None  # 3, or 0 where gradients travel compressed
    steps: int = 150
    preset: str = "small"
    text: Path | None = None
    compress: str | None = None
    attention: str = "dense"  # one of ATTENTIONS
    save: Path | None = None  # the folder of checkpoints
    save_every: int = 50
    resume: bool = False


def run(options: Options) -> int:
    """Train, report and check; 0 if the dense run agrees, else 1."""
    if options.stage is None:
        options = options._replace(stage=3 if options.compress is None else 0)
    assert options.stage is not None
    sliced, piped = options.tp > 1, options.pp > 1
    axes = ("pp",) * piped + ("dp",) + ("tp",) * sliced
    mesh = Mesh(**{name: getattr(options, name) for name in axes})
    console = Console(quiet=mesh.rank != 0, soft_wrap=True)
    config = gpt.preset(options.preset)
    rules = gpt.rules(config, staged=piped) if sliced else None
    if options.attention != "dense":
        config = dataclasses.replace(config, attention=layout_of(options.attention, config.length))
    if config.vocabulary < 256:
        raise ValueError(f"preset {options.preset!r} has a vocabulary below the 256 bytes")
    parts = 2 * options.pp if piped else 1  # micro-batches of a rank
    rows = math.ceil(ROWS / options.dp / parts) * options.dp * parts
    trained, held_out = read_text(options.text)
    console.print(
        f"GPT of {config.parameters:,} parameters on {mesh}, stage {options.stage}; "
        f"{rows} × {config.length} bytes a step; text of {len(trained) + len(held_out):,} bytes"
    )
    if isinstance(config.attention, Layout):
        console.print(f"{options.attention}: {config.attention}")

    cut = "tp" if sliced else None

    def whole_loss(params: PyTree, batch: Batch) -> Tensor:
        return gpt.loss(params, batch, config, cut)

    params: PyTree = gpt.init(config)
    loss_fn: Any = whole_loss
    if piped:
        params = gpt.split_params(params, config, options.pp)
        loss_fn = pipeline(gpt.stages(config, options.pp, cut), parts)
        console.print(f"{options.pp} stages, {parts} micro-batches: {loss_fn.schedule().name}")

    # What travels compressed is clipped by a bound of its norm, which no dense run knows.
    clip = CLIP if options.compress is None else None
    rate = warmup_cosine(PEAK, min(WARMUP, options.steps - 1), options.steps)
    exact = max(options.steps // 5, 1)  # steps at full precision
    if options.compress == "1bit":
        console.print(f"1-bit Adam: {exact} steps at full precision, then one bit a value")
        onebit = onebit_adam(rate, exact, weight_decay=DECAY, mask=_decays)
        init, step = train_step(loss_fn, onebit, mesh, stage=options.stage, slice_rules=rules)
    else:
        optimizer = adamw(rate, weight_decay=DECAY, mask=_decays)
        init, step = train_step(
            loss_fn,
            optimizer,
            mesh,
            stage=options.stage,
            clip=clip,
            compress=options.compress,
            slice_rules=rules,
        )
    state = init(params)
    batches = [sample(trained, rows, config.length, seed) for seed in range(options.steps)]
    state, losses = fit(step, state, batches, checkpoint=_checkpoints(options, config, mesh))

    def own_loss(params: PyTree, batch: Batch) -> Tensor:
        return whole_loss(local_slices(params), batch)

    def mean_loss(state: TrainState, batch: Batch) -> Tensor:
        if piped:
            return loss_fn.averaged("dp")(state.params, batch)[1]
        return pmean(own_loss(unshard(state.params), batch), "dp")

    evaluate = jit(spmd(mean_loss, mesh))
    tests = [sample(held_out, rows, config.length, seed) for seed in range(4)]
    held_out_loss = sum(evaluate(state, batch).item() for batch in tests) / len(tests)
    entropy = byte_entropy(trained)
    for place in sorted(
        {0, *range(19, options.steps, max(20, options.steps // 5)), options.steps - 1}
    ):
        console.print(f"step {place + 1:4d}: loss {losses[place]:.5f}")
    console.print(
        f"held-out loss {held_out_loss:.3f} nats a byte ({held_out_loss / math.log(2):.2f} bits); "
        f"the entropy of single bytes is {entropy:.3f} nats ({entropy / math.log(2):.2f} bits)"
    )

    def measure(state: TrainState, batch: Batch) -> Tensor:
        gradient = accumulate(own_loss, reduce=options.compress is None)
        if piped:
            gradient = loss_fn.averaged("dp")
        grads, _ = gradient(state.params, batch)
        sizes = [[held(state.params), held(grads), held(state.opt_state)]]
        return all_gather_invariant(torch.tensor(sizes), axes)

    few = sample(trained, options.dp * parts, config.length, 0)
    sizes = spmd(measure, mesh)(state, few).tolist()
    placed = piped and mesh.interpreter == "processes"
    counts = parameters_of_ranks(config, options.tp, options.pp, placed)
    console.print(memory_table(sizes, counts, options))
    if mesh.rank != 0:
        return 0
    checked, tolerance = CHECKED, TOLERANCE
    if options.compress == "1bit":
        checked = min(CHECKED, exact)
    elif options.compress is not None:
        tolerance = COMPRESSED_TOLERANCE
    return check(console, config, batches[:checked], losses, options.steps, clip, tolerance)


def _checkpoints(options: Options, config: gpt.Config, mesh: Mesh) -> Checkpoints | None:
    """Where the run is saved, with what ``zero-fn generate`` wants to know of the model."""
    if options.save is None:
        if options.resume:
            raise ValueError("--resume goes on from --save FOLDER, which is missing")
        return None
    steps = saved_steps(options.save)
    if steps and not options.resume:
        raise ValueError(
            f"--save {options.save}: there are checkpoints of the steps {steps}; go on from them "
            "with --resume, or take another folder"
        )
    if not mesh.rank:
        other = {} if options.attention == "dense" else {"attention": options.attention}
        save_config(options.save, config, **other)
    return Checkpoints(options.save, mesh, every=options.save_every, keep=2)


def layout_of(name: str, length: int) -> Layout:
    """The layout of a name that a causal model of this length trains with, for any heads.

    Raises:
        ValueError: for an unknown name, with the known ones.
    """
    if name not in ATTENTIONS[1:]:
        raise ValueError(f"no attention {name!r}; there are {', '.join(ATTENTIONS)}")
    return getattr(Layout, name)(length, block=BLOCK, attention="unidirectional").tril()


def _decays(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) > 1


def read_text(path: Path | None) -> tuple[Tensor, Tensor]:
    """The bytes of a file, or of the Python files of a folder, as (training, held-out) tokens.

    Raises:
        FileNotFoundError: if there is no such file or folder.
        ValueError: if there is too little text.
    """
    source = Path(sysconfig.get_paths()["stdlib"]) if path is None else path
    if not source.exists():
        raise FileNotFoundError(f"--text {source}: no such file or folder")
    files = (
        [source] if source.is_file() else sorted(source.glob("*.py" if path is None else "**/*"))
    )
    data, size = [], 0
    for file in files:
        if file.is_file() and size < TEXT_LIMIT:
            data.append(file.read_bytes()[: TEXT_LIMIT - size])
            size += len(data[-1])
    # Held-out text comes from whole files, not from the rest of ones that were trained on.
    random.Random(0).shuffle(data)
    tokens = torch.frombuffer(bytearray(b"".join(data)), dtype=torch.uint8)
    if len(tokens) < 10_000:
        raise ValueError(f"--text {source}: {len(tokens)} bytes are too few; give at least 10000")
    cut = len(tokens) * 9 // 10
    return tokens[:cut], tokens[cut:]


def sample(tokens: Tensor, rows: int, length: int, seed: int) -> Batch:
    """Random pieces of a text: (tokens, the tokens that follow), each (rows, length)."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(tokens) - length - 1, (rows, 1), generator=generator)
    pieces = tokens[starts + torch.arange(length + 1)].long()
    return pieces[:, :-1].contiguous(), pieces[:, 1:].contiguous()


def byte_entropy(tokens: Tensor) -> float:
    """The entropy of single bytes, in nats."""
    share = torch.bincount(tokens.long(), minlength=256).double() / len(tokens)
    return -(share * share.clamp(min=1e-300).log()).sum().item()


def parameters_of_ranks(config: gpt.Config, tp: int, pp: int, placed: bool) -> list[int]:
    """The parameters of a rank's slices, padding included, in each stage of the pipeline.

    ``placed`` says whether ranks hold their own stage alone, with a copy of what is tied.
    """
    params: PyTree = gpt.init(config)
    rules = gpt.rules(config, staged=pp > 1)
    if pp > 1:
        params = gpt.split_params(params, config, pp)
        params = tree.map(torch.clone, params) if placed else params
    ranks = Mesh(backend="simulated", tp=tp).abstract()
    slices = spmd(lambda p: slice_params(p, rules), ranks)(params)
    each = slices if pp > 1 and placed else [slices]
    return [sum(x.numel() for x in tree.leaves(stage)) for stage in each]


def held(state: PyTree) -> int:
    """The bytes of this rank's tensors, called in a rank's program."""
    return sum(x.numel() * x.element_size() for x in tree.leaves(state))


def memory_table(sizes: list[list[int]], parameters: list[int], options: Options) -> Table:
    """Each rank's bytes at rest, beside ZeRO's formula for float32 and Adam.

    ``parameters`` are those of a rank's slices, for each stage of the pipeline that is on ranks of
    its own.
    """
    n, stage = options.dp, options.stage
    assert stage is not None
    table = Table(title=f"MiB that a rank holds at rest, stage {stage}")
    for column in ("", "parameters", "gradients", "optimizer state"):
        table.add_column(column, justify="left" if not column else "right")
    for rank, row in enumerate(sizes):
        table.add_row(f"rank {rank}", *[f"{size / 2**20:.3f}" for size in row])
    table.add_section()
    for place, count in enumerate(parameters):
        formula = [
            4 * count / (n if stage >= 3 else 1),
            4 * count / (n if stage >= 2 else 1),
            8 * count / (n if stage >= 1 else 1),
        ]
        name = "ZeRO's formula" + f", pp {place}" * (len(parameters) > 1)
        table.add_row(name, *[f"{size / 2**20:.3f}" for size in formula])
    if options.compress is not None:
        table.caption = "with compression: optimizer state and error feedback, whole on each rank"
    elif stage in (1, 2):
        table.caption = "parameters rest as pieces, and are whole during a step"
    if options.pp > 1 and len(parameters) == 1:
        table.caption = "simulated ranks of pp hold all stages; on processes each holds its own"
    return table


def check(
    console: Console,
    config: gpt.Config,
    batches: list[Batch],
    losses: list[float],
    steps: int,
    clip: float | None = CLIP,
    tolerance: float = TOLERANCE,
) -> int:
    """Run the first steps again with torch.autograd and torch.optim alone, and dense scores."""
    if isinstance(config.attention, Layout):
        seen = config.attention.to_dense()
        scores = functools.partial(F.scaled_dot_product_attention, attn_mask=seen)
        config = dataclasses.replace(config, attention=scores)
    params = gpt.init(config)
    params = tree.map(lambda x: x.requires_grad_(), params)
    leaves = list({id(x): x for x in tree.leaves(params)}.values())
    groups = [
        {"params": [x for x in leaves if x.ndim > 1], "weight_decay": DECAY},
        {"params": [x for x in leaves if x.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=PEAK)
    rate = warmup_cosine(PEAK, min(WARMUP, steps - 1), steps)
    worst = 0.0
    for count, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(torch.tensor(count)).item()
        loss = gpt.loss(params, batch, config)
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, clip)
        optimizer.step()
        worst = max(worst, abs(loss.item() - losses[count]) / loss.item())
    agree = worst < tolerance
    console.print(
        f"the first {len(batches)} steps run dense, with torch.optim alone: losses "
        + (f"agree to {worst:.1e}" if agree else f"DIFFER by {worst:.1e}, above {tolerance:.0e}")
    )
    return 0 if agree else 1
