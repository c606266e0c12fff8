"""Compile kernels for GPUs that are not here, and read off what the compiler made of them.

``VARIANTS`` has one row a shipped variant of a kernel; a new kernel adds its rows. The figures are
kept in ``aot_table.json``: registers and stack a thread, shared memory a program, 16-byte loads and
stores, tensor-core instructions. A change of the table is a change to review; to write it anew:

    python -m tests.kernels.aot
"""

import functools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

CAPABILITIES = (80, 90, 100)
TABLE = Path(__file__).parent / "aot_table.json"
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


class Variant(NamedTuple):
    """A kernel as it is launched: types of arguments by name, constants, compiler options."""

    name: str
    kernel: Callable[[], Any]  # imports it, so that a row costs nothing
    signature: Mapping[str, str]  # "*fp32", "i32", ...; pointers are taken to be 16-byte aligned
    constants: Mapping[str, Any]  # constexprs and arguments that are None
    options: Mapping[str, int]  # num_warps, num_stages
    tensor_cores: bool = False  # whether it must use them
    multiples: Sequence[str] = ()  # arguments that are multiples of 16, besides the pointers
    wide_loads: bool = True  # whether it must read 16 bytes at once


class Figures(NamedTuple):
    registers: int  # a thread
    stack: int  # bytes a thread: spilled registers
    shared: int  # bytes a program
    loads_16: int  # instructions of 16 bytes
    stores_16: int
    tensor_core: int  # instructions


def compile_variant(variant: Variant, capability: int) -> Figures:
    kernel = variant.kernel()
    place = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    kinds = {
        name: "constexpr" if name in variant.constants else variant.signature[name]
        for name in kernel.arg_names
    }
    source = ASTSource(
        kernel,
        signature=kinds,
        constexprs={place[name]: value for name, value in variant.constants.items()},
        attrs={
            place[name]: [["tt.divisibility", 16]]
            for name, kind in kinds.items()
            if kind.startswith("*") or name in variant.multiples
        },
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=dict(variant.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _dump("--dump-resource-usage", file.name)
        code = _dump("-sass", file.name)
    used = {name: int(value) for name, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    return Figures(
        used["REG"],
        used["STACK"] + used["LOCAL"],
        compiled.metadata.shared,
        len(re.findall(r"\bLDG\.E\S*\.128\b|\bLDGSTS\.E\S*\.128\b", code)),
        len(re.findall(r"\bSTG\.E\S*\.128\b", code)),
        # the instruction itself: HFMA2.MMA is no tensor-core one
        len(re.findall(r"\*/\s+(?:@!?U?P\w+ +)?(?:[HIQBD]G?MMA|UTC\w*MMA)\b", code)),
    )


def _dump(what: str, path: str) -> str:
    return subprocess.run(
        [CUOBJDUMP, what, path], check=True, capture_output=True, text=True
    ).stdout


def _adam_kernel() -> Any:
    from zero_fn.kernels.adam_triton import adam_kernel

    return adam_kernel


def _adam(
    name: str,
    *storage: str,
    copy: str | None = None,
    pure: bool = False,
    decoupled: bool = True,
    scaled: bool = False,
    by_chance: bool = False,
) -> Variant:
    import triton.language as tl

    from zero_fn.kernels import adam_triton

    types = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16, None: None}
    signature = {"leaves": "*i64", "sizes": "*i64", "decays": "*fp32", "blocks": "*i32"}
    signature |= {"step": "*i64", "lr": "*fp64", "grad_scale": "*fp32", "skip": "*i1"}
    signature |= {"seed": "*i64"} | dict.fromkeys(adam_triton.constants(0.9, 0.999, 1e-8), "fp32")
    constants: dict[str, Any] = dict(
        zip(("P", "G", "M", "V"), [types[x] for x in storage], strict=True)
    )
    constants |= {"COPY": types[copy], "DECOUPLED": decoupled, "PURE": pure, "ALIGNED": True}
    constants |= {"INTERPRETED": False, "BLOCK": adam_triton.BLOCK}
    if not scaled:
        constants |= {"grad_scale": None, "skip": None}
    if not by_chance:
        constants["seed"] = None
    return Variant(name, _adam_kernel, signature, constants, {"num_warps": adam_triton.NUM_WARPS})


_ATTENTION = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def _attention(
    which: Any, dtype: str, size: int, capability: int, *, bias: bool = False, fine: bool = False
) -> Variant:
    """A kernel of block-sparse attention with the tile that it is launched with."""
    from zero_fn.kernels import attention_tiles, attention_triton

    tiles = attention_tiles.tiles_for(which, _ATTENTION[dtype], size, capability, bias)
    tile = tiles[-1 if fine else 0]
    kernel = getattr(attention_triton, f"{which}_kernel")
    data = dict.fromkeys(("grad", "q", "k", "v", "bias", "out", "dq", "dk", "dv"), f"*{dtype}")
    data |= dict.fromkeys(("log_sum", "grad_log_sum", "delta"), "*fp32")
    tables = ("firsts", "order", "others", "masks", "patterns")
    data |= dict.fromkeys(tables, "*i32") | {"table": "*u8", "scale": "fp32"}
    signature = {name: data.get(name, "i32") for name in kernel.arg_names}
    constants = {"SIZE": size, "PADDED": attention_tiles.padded(size), "ROWS": tile.rows}
    constants |= {"COLUMNS": tile.columns, "EVEN": True, "EVEN_KEYS": True, "INTERPRETED": False}
    constants["PRECISION"] = attention_tiles.precision(_ATTENTION[dtype], size)
    constants |= {"bias": None} if not bias else {}
    constants |= {"grad_log_sum": None} if which == "dq" else {}
    # As Triton specialises the strides of contiguous tensors of such sizes.
    strides = [f"{name}_{dim}" for name in ("q", "k", "v") for dim in "bhl"]
    name = f"attention {which}: {dtype}, head size {size}{', bias' * bias}{', small blocks' * fine}"
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    cores = constants["PRECISION"] != "ieee" or dtype != "fp32"
    return Variant(name, lambda: kernel, signature, constants, options, cores, strides)


def _attentions(capability: int) -> Iterator[Variant]:
    for which in ("forward", "dq", "dkv"):
        for size in (16, 32, 64, 128, 256):
            for dtype in ("bf16", "fp32"):
                yield _attention(which, dtype, size, capability)
        yield _attention(which, "fp16", 64, capability)
        yield _attention(which, "bf16", 80, capability)
        yield _attention(which, "bf16", 64, capability, bias=True)
        yield _attention(which, "bf16", 128, capability, bias=True)
        yield _attention(which, "bf16", 256, capability, bias=True)
        yield _attention(which, "bf16", 64, capability, fine=True)
        yield _attention(which, "bf16", 128, capability, fine=True)
        yield _attention(which, "fp32", 64, capability, bias=True)


def _signs(which: str) -> Variant:
    """A kernel that packs or unpacks signs, with the blocks of ``compress``."""
    from zero_fn.kernels import sign_packing, sign_packing_triton

    kernel = getattr(sign_packing_triton, f"{which}_kernel")
    data = dict.fromkeys(("x", "error", "residual", "scales", "out"), "*fp32")
    data |= {"counts": "*i32", "bits": "*u8"}
    signature = {name: data[name] for name in kernel.arg_names if name in data}
    options = {"num_warps": sign_packing_triton.NUM_WARPS}
    constants = {"BLOCK": sign_packing.BLOCK}
    # Eight values come from one byte: there is nothing wide to read.
    wide = which != "unpack"
    return Variant(
        f"signs: {which}", lambda: kernel, signature, constants, options, wide_loads=wide
    )


@functools.cache
def variants(capability: int) -> tuple[Variant, ...]:
    """Every shipped variant as it is launched on sm_``capability``; names: ``kernel: variant``."""
    full, mixed, half = ("fp32",) * 4, ("fp32", "bf16", "fp32", "fp32"), ("bf16", "bf16")
    return (
        _adam("adam: float32, in place", *full),
        _adam("adam: float32, in place, scale and skip", *full, scaled=True),
        _adam("adam: float32, in place, L2", *full, decoupled=False),
        _adam("adam: float32, pure", *full, pure=True),
        _adam("adam: bf16 gradients", *mixed),
        _adam("adam: bf16 gradients and working copy", *mixed, copy="bf16", scaled=True),
        _adam("adam: bf16 parameters by chance", *half, "fp32", "fp32", by_chance=True),
        _adam("adam: all bf16, pure", *half, *half, pure=True),
        _signs("pack"),
        _signs("unpack"),
        *_attentions(capability),
    )


def names() -> list[str]:
    return [variant.name for variant in variants(CAPABILITIES[0])]


def table() -> dict[str, Any]:
    """All figures: variant, capability, name of the figure."""

    def figures(job: tuple[Variant, int]) -> dict[str, int]:
        return compile_variant(*job)._asdict()

    jobs = [(variant, c) for c in CAPABILITIES for variant in variants(c)]
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(figures, jobs))
    rows: dict[str, Any] = {name: {} for name in names()}
    for (variant, capability), row in zip(jobs, done, strict=True):
        rows[variant.name][f"sm_{capability}"] = row
    return {"triton": triton.__version__, "variants": rows}


def recorded() -> dict[str, Any]:
    return dict(json.loads(TABLE.read_text()))


def text(rows: Mapping[str, Any]) -> str:
    """The table as JSON with a line for each variant and GPU, so that a difference reads well."""
    parts = []
    for name, row in rows["variants"].items():
        lines = [f"      {json.dumps(gpu)}: {json.dumps(figures)}" for gpu, figures in row.items()]
        parts.append(f"    {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n    }")
    body = ",\n".join(parts)
    version = json.dumps(rows["triton"])
    return f'{{\n  "triton": {version},\n  "variants": {{\n{body}\n  }}\n}}\n'


if __name__ == "__main__":
    TABLE.write_text(text(table()))
    sys.stdout.write(TABLE.read_text())
