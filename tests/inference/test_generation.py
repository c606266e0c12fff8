"""Generation with a cache: the uncached forward, token by token, however the model is cut."""

import dataclasses
import functools
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zero_fn as zf
from tests.benchmarks.inference import compiled_decoder
from tests.processes import run_on_processes
from zero_fn import tree
from zero_fn.inference.generation import stream
from zero_fn.inference.sampling import Sampling, draw, sample
from zero_fn.kernels import Layout
from zero_fn.models import gpt
from zero_fn.models.gpt_decoding import decoder

CONFIG = gpt.Config(vocabulary=53, length=40, width=32, heads=4)


def sparse(heads: int) -> Layout:
    """Blocks of 16 × 16; the second row of blocks of the first head sees nothing."""
    seen = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool().repeat(heads, 1, 1)
    seen[0, 1] = False
    if heads > 1:
        seen[-1, 2, 0] = False
    return Layout.from_mask(seen, block=16, seq_len=40, k_len=40)


CONFIGS = {
    "dense": CONFIG,
    "shared keys": dataclasses.replace(CONFIG, kv_heads=2, tied=False),
    "sparse": dataclasses.replace(CONFIG, kv_heads=2, attention=sparse(1)),
    "a layout a head": dataclasses.replace(CONFIG, kv_heads=2, attention=sparse(4)),
}
PROMPTS = [[3, 50, 7, 7, 1], [9], [4, 8, 15, 16, 23, 42, 2, 0, 11, 30, 31, 32, 33, *range(17)]]


def model(config: gpt.Config, seed: int = 1) -> Any:
    """Float64, of weights so large that the tokens depend on all of the prompt."""
    return tree.map(lambda x: x.double() * (5 if x.ndim > 1 else 1), gpt.init(config, seed))


def uncached(params: Any, tokens: list[int], config: gpt.Config) -> Tensor:
    """The logits after the last token, by the forward of the whole sequence."""
    whole = torch.tensor([tokens])
    if isinstance(config.attention, Layout):
        whole = torch.nn.functional.pad(whole, (0, config.length - len(tokens)))
    return gpt.apply(params, whole, config)[0, len(tokens) - 1]


def greedy(params: Any, prompt: list[int], config: gpt.Config, count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(uncached(params, tokens, config).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_uncached_forward(name: str) -> None:
    config = CONFIGS[name]
    params, made = model(config), decoder(config)
    rows = [list(prompt) for prompt in PROMPTS]
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(3, 30, dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    tokens[1, 1:] = 17  # what stands past a row's length does not matter
    cache, logits = made.prefill(params, tokens, lengths, 40)
    for step in range(10):
        want = torch.stack([uncached(params, row, config) for row in rows])
        torch.testing.assert_close(logits, want, rtol=1e-9, atol=1e-9)  # float64's rounding
        following = torch.tensor([(7 * step + place) % 53 for place in range(3)])
        for row, token in zip(rows, following.tolist(), strict=True):
            row.append(token)
        cache, logits = made.decode(params, cache, following, 30 + step)
    assert cache.lengths.tolist() == [15, 11, 40]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_tokens_are_those_of_the_uncached_forward(name: str) -> None:
    config = CONFIGS[name]
    params = model(config)
    found = zf.generate(decoder(config), params, PROMPTS, max_new_tokens=11)
    assert found == [greedy(params, prompt, config, 11) for prompt in PROMPTS]
    assert len({tuple(row) for row in found}) == 3
    alone = zf.generate(decoder(config), params, torch.tensor(PROMPTS[0]), max_new_tokens=11)
    assert alone == found[0]


def test_a_sequence_ends_at_the_models_length() -> None:
    params = model(CONFIG)
    found = zf.generate(decoder(CONFIG), params, PROMPTS[::2])
    assert [len(row) for row in found] == [36, 11]  # the last token is made, and never read
    assert found[1] == greedy(params, PROMPTS[2], CONFIG, 11)
    full = [5] * 40
    assert len(zf.generate(decoder(CONFIG), params, full)) == 1


def test_a_stop_token_ends_its_row_only() -> None:
    params = model(CONFIG)
    free = zf.generate(decoder(CONFIG), params, PROMPTS, max_new_tokens=10)
    stop = free[0][4]
    found = zf.generate(decoder(CONFIG), params, PROMPTS, max_new_tokens=10, stop=[stop])
    for row, want in zip(found, free, strict=True):
        end = want.index(stop) + 1 if stop in want else 10
        assert row == want[:end]
    steps = list(stream(decoder(CONFIG), params, PROMPTS, max_new_tokens=10, stop=[stop]))
    assert [token for step in steps if (token := step[0]) is not None] == found[0]


def test_quantised_weights_generate() -> None:
    for method in ("int8", "int4", "fp8"):
        q = zf.quantize(gpt.init(CONFIG), method)  # type: ignore[arg-type]
        found = zf.generate(decoder(CONFIG), q, PROMPTS, max_new_tokens=4)
        assert found == [greedy(q, prompt, CONFIG, 4) for prompt in PROMPTS]


def sliced(mesh: zf.Mesh) -> list[list[list[int]]]:
    """Greedy and drawn tokens of a model that is cut over tp and sharded over dp."""
    config = CONFIGS["sparse"]
    rules = gpt.rules(config)
    stage = 3 if "dp" in mesh.shape else 0

    def init(params: Any) -> Any:
        slices = zf.slice_params(params, rules)
        return zf.shard(slices, stage) if stage else slices

    params = zf.spmd(init, mesh)(model(config))
    made = decoder(config, axis="tp")
    greedy = zf.generate(made, params, PROMPTS, max_new_tokens=4, mesh=mesh)
    key = zf.random.key(3)
    drawn = zf.generate(
        made, params, PROMPTS, max_new_tokens=4, mesh=mesh, temperature=1.0, top_k=9, key=key
    )
    return [greedy, drawn]


def whole() -> list[list[list[int]]]:
    config = CONFIGS["sparse"]
    params, made, key = model(config), decoder(config), zf.random.key(3)
    greedy = zf.generate(made, params, PROMPTS, max_new_tokens=4)
    drawn = zf.generate(made, params, PROMPTS, max_new_tokens=4, temperature=1.0, top_k=9, key=key)
    return [greedy, drawn]


@pytest.mark.parametrize("axes", [{"tp": 2}, {"dp": 2, "tp": 2}])
def test_sliced_models_make_the_same_tokens(axes: dict[str, int]) -> None:
    assert sliced(zf.Mesh(**axes)) == whole()


def sliced_on_processes() -> Any:
    return sliced(zf.Mesh(tp=2))


def test_sliced_models_on_processes() -> None:
    assert run_on_processes(2, sliced_on_processes) == [whole(), whole()]


def test_draws_follow_the_softmax() -> None:
    logits = torch.tensor([[1.0, 3.0, 0.0, 2.5, -1.0]])
    count = 20000
    keys = zf.random.split(zf.random.key(5), count)
    draws = draw(keys, torch.zeros(count, dtype=torch.int64))
    rows = logits.expand(count, -1)
    for setting, want in (
        (Sampling(1.0), logits[0].softmax(-1)),
        (Sampling(2.0), (logits[0] / 2).softmax(-1)),
        (
            Sampling(1.0, top_k=2),
            torch.tensor([0, 3.0, 0, 2.5, 0])
            .where(torch.tensor([False, True, False, True, False]), torch.tensor(-torch.inf))
            .softmax(-1),
        ),
        # 0.55, 0.33, 0.074, ...: the first two have 0.88.
        (
            Sampling(1.0, top_p=0.8),
            torch.tensor([-torch.inf, 3.0, -torch.inf, 2.5, -torch.inf]).softmax(-1),
        ),
        (Sampling(1.0, top_p=0.01), torch.tensor([0.0, 1, 0, 0, 0])),
        (Sampling(0.0), torch.tensor([0.0, 1, 0, 0, 0])),
    ):
        tokens = sample(rows, [setting] * count, draws)
        share = Counter(tokens.tolist())
        found = torch.tensor([share[i] / count for i in range(5)])
        # Four deviations of a share of 20000 draws: 4 * sqrt(0.25 / 20000).
        torch.testing.assert_close(found, want, rtol=0, atol=0.0142)
        assert all(found[i] == 0 for i in range(5) if want[i] == 0)


def test_the_least_set_of_the_top_p_is_drawn_from() -> None:
    """Four tokens of 1/4 each: two have a half together, and a third is not needed for it."""
    count = 200
    draws = draw(zf.random.split(zf.random.key(1), count), torch.zeros(count, dtype=torch.int64))
    tokens = sample(torch.zeros(count, 4), [Sampling(1.0, top_p=0.5)] * count, draws)
    assert set(tokens.tolist()) == {0, 1}


def test_a_rows_draw_depends_on_its_key_alone() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    settings = [Sampling(1.0), Sampling(), Sampling(0.7, 5), Sampling(1.3, None, 0.9)]
    draws = draw(zf.random.split(zf.random.key(0), 4), torch.arange(4))
    together = sample(logits, settings, draws)
    alone = [
        sample(logits[i : i + 1], settings[i : i + 1], draws[i : i + 1]).item() for i in range(4)
    ]
    assert together.tolist() == alone
    assert sample(logits[:1], settings[:1], torch.tensor([1 - 1e-17])).item() < 50


def test_keys_decide() -> None:
    params, made = model(CONFIG), decoder(CONFIG)

    def drawn(seed: int) -> Any:
        return zf.generate(
            made, params, PROMPTS[:2], max_new_tokens=9, temperature=1.0, key=zf.random.key(seed)
        )

    assert drawn(0) == drawn(0)
    assert drawn(0) != drawn(1)
    twice = zf.generate(
        made, params, [[1, 2], [1, 2]], max_new_tokens=9, temperature=1.0, key=zf.random.key(0)
    )
    assert twice[0] != twice[1]


@pytest.mark.parametrize(
    ("prompt", "settings", "message"),
    [
        ([], {}, "empty prompt"),
        ([[1], []], {}, "empty prompt"),
        ([1, 53], {}, "token 1 of the prompt is 53, .* 0 to 52"),
        ([-1], {}, "token 0 of the prompt is -1"),
        ([1] * 41, {}, "41 tokens is longer than the model's sequences, of 40"),
        ([1] * 30, {"max_new_tokens": 12}, "it can make 11 new tokens"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"temperature": -1.0}, "temperature is -1.0"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"temperature": 1.0}, r"key=zf.random.key\(0\)"),
        ([1], {"top_k": 3}, "give a temperature"),
        ([1], {"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ([1], {"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
    ],
)
def test_what_cannot_be_generated(prompt: Any, settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        zf.generate(decoder(CONFIG), gpt.init(CONFIG), prompt, **settings)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"vocabulary": 60}, "rows of tokens 60, expected 53"),
        ({"layers": 1}, "layers 1, expected 2"),
        ({"width": 64}, "width 64, expected"),
        ({"length": 30}, "length 30, expected 40"),
        ({"kv_heads": 1, "heads": 2}, "outputs of qkv, expected"),
    ],
)
def test_parameters_of_another_model(other: Any, message: str) -> None:
    params = gpt.init(dataclasses.replace(CONFIG, **other))
    for given in (params, zf.quantize(params)):
        with pytest.raises(ValueError, match=message):
            zf.generate(decoder(CONFIG), given, [1])
    with pytest.raises(ValueError, match="params has no tokens, positions, blocks, norm, head"):
        zf.generate(decoder(CONFIG), {"w": torch.ones(3)}, [1])


def test_prompts_of_numpy() -> None:
    params = gpt.init(CONFIG)
    want = zf.generate(decoder(CONFIG), params, [[1, 2], [3, 4]], max_new_tokens=3)
    for given in (np.array([[1, 2], [3, 4]]), [np.array([1, 2]), [np.int32(3), 4]]):
        found: Any = zf.generate(decoder(CONFIG), params, given, max_new_tokens=3)
        assert found == want
    alone: Any = np.array([1, 2])
    assert zf.generate(decoder(CONFIG), params, alone, max_new_tokens=3) == want[0]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_step_makes_the_same_tokens(dtype: torch.dtype) -> None:
    config = gpt.Config(256, 64)
    params = zf.quantize(tree.map(lambda x: x.to(dtype), gpt.init(config)))
    made = decoder(config)
    want = zf.generate(made, params, [1, 2, 3], max_new_tokens=9)
    for compiler in (
        functools.partial(zf.jit, compiler="inductor"),
        functools.partial(torch.compile, fullgraph=True),
    ):
        with torch.no_grad():
            ready = compiled_decoder(made, compiler)
            assert zf.generate(ready, params, [1, 2, 3], max_new_tokens=9) == want


@pytest.mark.parametrize("prompt", [None, 3, torch.tensor(3), [1, [2]], b"abc", ["abc"], [True]])
def test_what_is_no_prompt(prompt: Any) -> None:
    with pytest.raises(TypeError, match="token ids"):
        zf.generate(decoder(CONFIG), gpt.init(CONFIG), prompt)


def test_text_is_not_tokens_and_nan_is_no_token() -> None:
    params = gpt.init(CONFIG)
    with pytest.raises(TypeError, match=r"list\(text.encode\(\)\)"):
        zf.generate(decoder(CONFIG), params, "hello")
    with pytest.raises(TypeError, match=r"token 1 is 2\.5"):
        zf.generate(decoder(CONFIG), params, [1, 2.5])
    params["norm"]["scale"][3] = torch.nan
    with pytest.raises(ValueError, match="look for NaN in the parameters"):
        zf.generate(decoder(CONFIG), params, [1])
    with pytest.raises(ValueError, match="write it as 'dense' or as a Layout"):
        decoder(dataclasses.replace(CONFIG, attention=lambda q, k, v: v))
