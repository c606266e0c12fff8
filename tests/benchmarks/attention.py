"""Block-sparse attention on a CPU, against dense SDPA and FlexAttention's forward.

    python -m tests.benchmarks.attention

Each row of blocks sees the same number of blocks, at random places. Prints medians of interleaved
repetitions and ratios in one run. Goals at density 1/8: 4.5 times faster than dense SDPA in
float32 and 3.5 times in bfloat16, forward and forward + backward; 1.0 times FlexAttention's forward
(its backward does not run on a CPU).
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from tests.benchmarks.timing import interleaved, where
from zero_fn.kernels import Layout, block_sparse_attention

BLOCK = 128
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def evenly_random(length: int, density: float, block: int = BLOCK) -> Layout:
    """A layout that any heads share, with the same number of random blocks in each row."""
    blocks = length // block
    generator = torch.Generator().manual_seed(0)
    rank = torch.rand(blocks, blocks, generator=generator).argsort(1).argsort(1)
    return Layout.from_mask(rank < max(1, round(density * blocks)), block)


def contestants(
    qkv: tuple[Tensor, Tensor, Tensor], layout: Layout, flex: bool
) -> dict[str, dict[str, Callable[[], object]]]:
    """By forward and forward + backward, ours first."""

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return block_sparse_attention(q, k, v, layout)

    def both(f: Callable[..., Tensor]) -> Callable[[], object]:
        leaves = [x.detach().requires_grad_() for x in qkv]
        grad = torch.ones_like(qkv[0])
        return lambda: torch.autograd.grad(f(*leaves), leaves, grad)

    forward: dict[str, Callable[[], object]] = {
        "block_sparse_attention": lambda: ours(*qkv),
        "dense SDPA": lambda: F.scaled_dot_product_attention(*qkv),
    }
    if flex:
        compiled = torch.compile(flex_attention, dynamic=False)
        mask = layout.to_block_mask()
        forward["FlexAttention"] = lambda: compiled(*qkv, block_mask=mask)
    backward = {
        "block_sparse_attention": both(ours),
        "dense SDPA": both(F.scaled_dot_product_attention),
    }
    return {"forward": forward, "forward + backward": backward}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--dtypes", nargs="*", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--density", type=float, default=1 / 8)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--size", type=int, default=64, help="head size")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-flex", action="store_true", help="it compiles C++ code first")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    table = Table(title=f"{options.heads} heads of {options.size}, blocks of {BLOCK}, ms")
    for column in ("length", "dtype", "", "what", "median", "times ours"):
        table.add_column(column, justify="right" if column in ("median", "times ours") else "left")
    for length in options.lengths:
        layout = evenly_random(length, options.density)
        for name in options.dtypes:
            shape = (1, options.heads, length, options.size)
            generator = torch.Generator().manual_seed(1)
            q, k, v = (torch.randn(shape, generator=generator).to(DTYPES[name]) for _ in range(3))
            for pass_, runs in contestants((q, k, v), layout, not options.no_flex).items():
                times = interleaved(runs, options.repeats)
                base = times["block_sparse_attention"]
                for what, taken in times.items():
                    cells = (f"{taken * 1e3:.1f}", f"{taken / base:.2f}")
                    table.add_row(str(length), name, pass_, what, *cells)
            table.add_section()
    console = Console(width=110)
    console.print(table)
    console.print(f"density {layout.density:.3g} of the longest; {where()}")
    console.print(f"python -m tests.benchmarks.attention {' '.join(sys.argv[1:])}")


if __name__ == "__main__":
    main()
