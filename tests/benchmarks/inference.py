"""Inference on a CPU: quantised weights, decoding, distillation, and many clients at once.

    python -m tests.benchmarks.inference

Goals: int8 takes at most 0.27 of float32's bytes and changes the held-out loss of the demo's model
by at most 0.5 %; decoding with int8 is at least as fast as with torchao's int8 weight-only on the
same model; distillation takes at most a quarter of the plain loss's memory; 64 clients get at least
four times the throughput of one after another, with the same tokens, no request lost, and the 99th
percentile of the queue's time under max_wait plus one batch.

``--only`` runs one part; ``--seconds 60`` keeps the load up for so long. torchao takes part where
it is installed (the extra ``peers``).
"""

import argparse
import dataclasses
import functools
import importlib.util
import random
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import zero_fn as zf
from tests.benchmarks.timing import interleaved, where
from tests.memory import peak
from zero_fn import tree
from zero_fn.demo import read_text, sample
from zero_fn.inference.quantization import METHODS
from zero_fn.inference.quantization_errors import tree_bytes
from zero_fn.models import gpt
from zero_fn.models.decoding import Cache, Decoder
from zero_fn.models.gpt_decoding import decoder

PARTS = ("loss", "decoding", "distillation", "clients")
CLIENTS = 64


def trained(config: gpt.Config, steps: int) -> tuple[Any, list[tuple[Tensor, Tensor]]]:
    """The demo's model after some steps on the demo's text, and batches it has not seen."""
    text, held_out = read_text(None)
    init, step = zf.train_step(
        lambda params, batch: gpt.loss(params, batch, config),
        zf.adamw(zf.warmup_cosine(2e-3, max(min(20, steps - 1), 0), steps), weight_decay=0.1),
        zf.Mesh(dp=1),
        clip=1.0,
        stage=0,
    )
    state = init(gpt.init(config))
    for seed in range(steps):
        state, _ = step(state, sample(text, 16, config.length, seed))
    params = zf.gather_tree(state.params, zf.Mesh(dp=1))
    return params, [sample(held_out, 16, config.length, seed) for seed in range(4)]


@torch.no_grad()
def held_out_loss(params: Any, batches: Sequence[Any], config: gpt.Config) -> float:
    return sum(gpt.loss(params, batch, config).item() for batch in batches) / len(batches)


def loss_part(console: Console, params: Any, batches: Sequence[Any], config: gpt.Config) -> None:
    table = Table("weights", "bytes", "of float32", "held-out loss", "change, %")
    before, size = held_out_loss(params, batches, config), tree_bytes(params)
    table.add_row("float32", f"{size:,}", "1", f"{before:.5f}", "")
    made = [(method, {}) for method in METHODS] + [("int8", {"activations": "int8"})]
    for method, settings in made:
        q = zf.quantize(params, method, **settings)  # type: ignore[arg-type]
        loss, now = held_out_loss(q, batches, config), tree_bytes(q)
        name = f"{method}, inputs int8" if settings else method
        change = 100 * (loss / before - 1)
        table.add_row(name, f"{now:,}", f"{now / size:.3f}", f"{loss:.5f}", f"{change:+.3f}")
    console.print(table)


def torchao_weights(params: Any) -> Any:
    """The same tree, with the weights of linear layers as torchao's int8 weight-only tensors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        def of_torchao(path: str, x: Tensor) -> Tensor:
            if not is_linear(path, tuple(x.shape)):
                return x
            module = torch.nn.Sequential(torch.nn.Linear(x.shape[1], x.shape[0], bias=False))
            module[0].weight = torch.nn.Parameter(x.clone())
            quantize_(module, Int8WeightOnlyConfig())
            weight: Tensor = module[0].weight.detach()
            return weight

        return tree.map_with_path(of_torchao, params)


def is_linear(path: str, shape: tuple[int, ...]) -> bool:
    return path == "head" or (path.startswith("blocks") and path.endswith("weight"))


def decoding_part(
    console: Console, config: gpt.Config, tokens: int, repeats: int, compiled: bool
) -> None:
    made, params = decoder(config), gpt.init(config)
    low = tree.map(Tensor.bfloat16, params)
    quantize = functools.partial(zf.quantize, where=is_linear)
    weights = {
        "float32": params,
        "bfloat16": low,
        "int8, float32": quantize(params),
        "int8, bfloat16": quantize(low),
    }
    if importlib.util.find_spec("torchao"):
        weights["torchao int8, float32"] = torchao_weights(params)
        weights["torchao int8, bfloat16"] = torchao_weights(low)
    prompt = [1, 2, 3, 4]
    runs: dict[str, Callable[[], object]] = {
        name: functools.partial(zf.generate, made, w, prompt, max_new_tokens=tokens)
        for name, w in weights.items()
    }
    if compiled:
        # Each by its own way: torchao is made for torch.compile.
        step = functools.partial(zf.jit, compiler="inductor")
        for name, w in weights.items():
            ready = compiled_decoder(made, torch.compile if name.startswith("torchao") else step)
            runs[f"{name}, compiled"] = functools.partial(
                zf.generate, ready, w, prompt, max_new_tokens=tokens
            )
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        seconds = interleaved(runs, repeats)
    table = Table("weights", "ms a token", "tokens/s", title=f"decoding, batch 1, {config}")
    for name, taken in seconds.items():
        table.add_row(name, f"{1e3 * taken / tokens:.3f}", f"{tokens / taken:.1f}")
    console.print(table)
    for dtype in ("float32", "bfloat16"):
        for how in ("", ", compiled"):
            peer = seconds.get(f"torchao int8, {dtype}{how}")
            if peer is not None:
                ratio = peer / seconds[f"int8, {dtype}{how}"]
                console.print(f"int8, {dtype}{how}: {ratio:.2f} times as fast as torchao")


def compiled_decoder(made: Decoder, compiler: Callable[..., Any]) -> Decoder:
    """The model with a compiled step, which reads all that the cache has room for."""

    def step(params: Any, cache: Cache, tokens: Tensor) -> Any:
        after, logits = made.decode(params, cache, tokens, None)
        return after.lengths, logits

    ready = compiler(step)

    def decode(params: Any, cache: Cache, tokens: Tensor, longest: int | None) -> Any:
        lengths, logits = ready(params, cache, tokens)
        return cache._replace(lengths=lengths), logits

    return made._replace(decode=decode)


def distillation_part(console: Console, tokens: int, width: int, vocabulary: int) -> None:
    student = (torch.randn(tokens, width), torch.randn(vocabulary, width) / width**0.5)
    teacher = (torch.randn(tokens, 2 * width), torch.randn(vocabulary, 2 * width) / width**0.5)

    def plain(student: Any) -> Tensor:
        s, t = (hidden @ head.T for hidden, head in (student, teacher))
        return F.kl_div(s.log_softmax(-1), t.softmax(-1), reduction="batchmean")

    def chunked(student: Any) -> Tensor:
        return zf.distillation_loss(student, teacher)

    given = [*student, *teacher]
    rows = {}
    for name, f in (("plain", plain), ("zf.distillation_loss", chunked)):
        start = time.perf_counter()
        taken = peak(lambda f=f: zf.grad(f)(student), given)  # type: ignore[misc]
        rows[name] = taken, time.perf_counter() - start
    table = Table("loss", "peak, MiB", "seconds", title=f"{tokens} tokens, vocabulary {vocabulary}")
    for name, (taken, seconds) in rows.items():
        table.add_row(name, f"{taken / 2**20:.0f}", f"{seconds:.2f}")
    console.print(table)
    console.print(f"memory: {rows['zf.distillation_loss'][0] / rows['plain'][0]:.3f} of the plain")


def resident() -> int:
    """This process's memory, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def load(
    answer: Callable[[list[int], int], list[int]],
    asked: Sequence[tuple[list[int], int]],
    want: Sequence[list[int]] | None,
    seconds: float,
) -> tuple[float, int, int, list[int]]:
    """Clients that ask one request after another: (tokens/s, requests, wrong ones, memory)."""
    counts, memory = [0, 0, 0], []
    lock, start = threading.Lock(), time.perf_counter()
    end = start + seconds

    def client(number: int) -> None:
        place, asked_once = number, False
        while not asked_once or time.perf_counter() < end:
            asked_once = True
            prompt, count = asked[place % len(asked)]
            found = answer(prompt, count)
            with lock:
                counts[0] += len(found)
                counts[1] += 1
                counts[2] += want is not None and found != want[place % len(asked)]
                if counts[1] % CLIENTS == 0:
                    memory.append(resident())
            place += CLIENTS

    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(client, range(CLIENTS)))
    return counts[0] / (time.perf_counter() - start), counts[1], counts[2], memory


def clients_part(
    console: Console, made: Decoder, params: Any, config: gpt.Config, seconds: float
) -> None:
    rng = random.Random(0)
    asked = [
        ([rng.randrange(config.vocabulary) for _ in range(rng.randint(1, config.length // 2))],
         rng.randint(1, config.length // 2))
        for _ in range(2 * CLIENTS)
    ]  # fmt: skip
    start = time.perf_counter()
    want = [zf.generate(made, params, prompt, max_new_tokens=n) for prompt, n in asked]
    alone = sum(map(len, want)) / (time.perf_counter() - start)
    table = Table("", "tokens/s", "of one by one", "requests", "wrong", title=f"{CLIENTS} clients")
    table.add_row("one by one", f"{alone:.0f}", "1", str(len(asked)), "")

    with zf.ContinuousBatcher(made, params, slots=CLIENTS) as batcher:
        stop, vanished = threading.Event(), [0]

        def vanishing() -> None:
            """A client that goes away after its first token, again and again."""
            while not stop.is_set():
                tokens = batcher.stream(asked[vanished[0] % len(asked)][0])
                next(tokens)
                tokens.close()  # type: ignore[attr-defined]
                vanished[0] += 1
                time.sleep(0.05)

        ghost = threading.Thread(target=vanishing)
        ghost.start()
        rate, requests, wrong, memory = load(
            lambda prompt, n: batcher.submit(prompt, max_new_tokens=n).result(),
            asked, want, seconds,
        )  # fmt: skip
        stop.set()
        ghost.join()
        metrics = batcher.metrics()
    table.add_row("continuous", f"{rate:.0f}", f"{rate / alone:.2f}", str(requests), str(wrong))
    queue = metrics.queue_p99

    longest = [0.0]

    def together(items: list[tuple[list[int], int]]) -> list[list[int]]:
        begun = time.perf_counter()
        most = max(n for _, n in items)
        rows = zf.generate(made, params, [prompt for prompt, _ in items], max_new_tokens=most)
        longest[0] = max(longest[0], time.perf_counter() - begun)
        return [row[:n] for row, (_, n) in zip(rows, items, strict=True)]

    wait = 10.0
    with zf.Batcher(together, max_batch=CLIENTS, max_wait_ms=wait) as dynamic:
        rate, requests, wrong, _ = load(
            lambda prompt, n: dynamic.submit((prompt, n)).result(), asked, want, seconds
        )
        figures = dynamic.metrics()
    table.add_row("Batcher", f"{rate:.0f}", f"{rate / alone:.2f}", str(requests), str(wrong))
    console.print(table)
    console.print(
        f"continuous: {metrics.batch_size:.1f} sequences a step, queue p99 {1e3 * queue:.1f} ms, "
        f"{vanished[0]} clients vanished, {metrics.failed} failed\n"
        f"Batcher: {figures.batch_size:.1f} requests a batch, queue p99 "
        f"{1e3 * figures.queue_p99:.1f} ms, max_wait plus the longest batch "
        f"{wait + 1e3 * longest[0]:.1f} ms"
    )
    if len(memory) > 3:
        early, late = memory[len(memory) // 4], memory[-1]
        console.print(
            f"memory at a quarter of the load {early / 2**20:.1f} MiB, at its end "
            f"{late / 2**20:.1f} MiB"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--tiny", action="store_true", help="the smallest shapes")
    parser.add_argument("--steps", type=int, default=150, help="of training, for the loss")
    parser.add_argument("--tokens", type=int, default=32, help="a run of decoding")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="compiled decoding too: minutes")
    parser.add_argument("--layers", type=int, help="of the model that decodes; 12 if unset")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    console = Console(width=110, soft_wrap=True)
    console.print(where())
    parts = PARTS if given.only is None else (given.only,)
    config = gpt.preset("tiny" if given.tiny else "small")
    if "loss" in parts or "clients" in parts:
        params, batches = trained(config, given.steps)
    if "loss" in parts:
        loss_part(console, params, batches, config)
    if "decoding" in parts:
        large = gpt.Config(256, 64) if given.tiny else gpt.preset("gpt2")
        large = dataclasses.replace(large, layers=given.layers or large.layers)
        decoding_part(console, large, given.tokens, given.repeats, given.compile)
    if "distillation" in parts:
        distillation_part(console, *((64, 16, 501) if given.tiny else (2048, 128, 50257)))
    if "clients" in parts:
        clients_part(console, decoder(config), params, config, given.seconds)


if __name__ == "__main__":
    main()
