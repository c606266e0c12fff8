"""torch.nn modules, and transformers' GPT-2 and Llama, on quantised weights."""

import copy
import threading
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from tests.memory import peak
from zero_fn.inference.quantization import METHODS

# Of the logits' norm. Rounding a weight changes it by 1, 3 and 8 %, of which a few layers make more
# (measured over two seeds: 1.0, 4.6 and 17 %).
ERROR = {"int8": 0.03, "fp8": 0.08, "int4": 0.25}

# What computing on them adds: inputs in two digits of int8, sums in another order.
COMPUTED = 1e-3


class Model(torch.nn.Module):
    """Tied weights, packed attention weights, and a list of weights that its part holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(13, 8, padding_idx=0)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.BatchNorm1d(8)
        self.recurrent = torch.nn.LSTM(8, 8, batch_first=True)
        self.bilinear = torch.nn.Bilinear(8, 8, 8)
        self.head = torch.nn.Linear(8, 13, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        x = x + self.recurrent(x)[0]
        return self.head(self.bilinear(x, x))


TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("training", [True, False])
def test_a_module_computes_on_them(method: Any, training: bool) -> None:
    torch.manual_seed(0)
    params, apply = zf.from_module(Model().train(training))
    q = zf.quantize(params, method)
    assert "head.weight" not in q  # tied
    whole = zf.dequantize(q)
    want, buffers = apply(whole, TOKENS, buffers=apply.buffers)
    found, found_buffers = apply(q, TOKENS, buffers=apply.buffers)
    assert (found - want).norm() < 5 * COMPUTED * want.norm()  # five layers
    torch.testing.assert_close(found_buffers, buffers, rtol=1e-2, atol=1e-3)
    # Plain and quantised in turns: nothing of the one stays for the other.
    assert torch.equal(apply(whole, TOKENS), want)
    mixed = {**params, "head.weight": None} | {"attention.in_proj_weight": q["embedding.weight"]}
    with pytest.raises(ValueError, match=r"attention\.in_proj_weight' has shape"):
        apply(mixed, TOKENS)


def test_a_module_that_raises_is_left_as_it_was() -> None:
    params, apply = zf.from_module(Model())
    q = zf.quantize(params)
    before = [(name, id(p)) for name, p in apply.module.named_parameters(remove_duplicate=False)]
    with pytest.raises(RuntimeError):
        apply(q, TOKENS.float())
    after = [(name, id(p)) for name, p in apply.module.named_parameters(remove_duplicate=False)]
    assert after == before
    torch.testing.assert_close(apply(params, TOKENS), apply(params, TOKENS))


def test_the_module_itself_takes_them() -> None:
    """``zf.to_module`` writes what they stand for."""
    module = Model()
    params, _ = zf.from_module(module)
    q = zf.quantize(params)
    zf.to_module(module, q)
    torch.testing.assert_close(zf.from_module(module).params, zf.dequantize(q))


def test_an_embedding_reads_its_rows_only() -> None:
    params, apply = zf.from_module(torch.nn.Embedding(20000, 50))
    q = zf.quantize(params)
    weight = q["weight"]
    assert peak(lambda: apply(q, TOKENS), [weight.values, weight.scales]) < 20000 * 50
    params, apply = zf.from_module(torch.nn.Embedding(20, 8, max_norm=1.0))
    with pytest.raises(ValueError, match="max_norm=1"):
        torch.nn.functional.embedding(TOKENS, zf.quantize(params)["weight"], max_norm=1)


def test_traced_sharded_and_on_simulated_ranks() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Tanh(), torch.nn.Linear(7, 5))
    params, apply = zf.from_module(module)
    q, x = zf.quantize(params), torch.randn(6, 9)
    want = apply(q, x)
    torch.testing.assert_close(zf.jit(apply)(q, x), want)
    by_row = torch.func.vmap(lambda row: apply(q, row))(x)
    # kernels against blocks
    torch.testing.assert_close(by_row, want, rtol=COMPUTED, atol=COMPUTED)
    mesh = zf.Mesh(dp=3)
    pieces = zf.spmd(lambda p: zf.shard(p, 3), mesh)(q)
    with pytest.raises(ValueError, match=r"no whole tensor; zf\.unshard"):
        apply(pieces, x)

    def step(pieces: Any, x: Tensor) -> Tensor:
        return zf.all_gather_invariant(apply(zf.unshard(pieces), x), "dp")

    found = zf.spmd(step, mesh)(pieces, x)
    torch.testing.assert_close(found, want, rtol=COMPUTED, atol=COMPUTED)


def test_what_is_not_quantised_can_be_trained() -> None:
    """A quantised body that stays, a head that learns."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Tanh(), torch.nn.Linear(7, 1))
    params, apply = zf.from_module(module)
    q = zf.quantize(params, where="0.weight")
    x, y = torch.randn(12, 9), torch.randn(12, 1)

    def loss(params: Any, batch: Any) -> Tensor:
        return (apply(params, batch[0]) - batch[1]).square().mean()

    losses = {}
    for name, given in {"plain": zf.dequantize(q), "quantised": q}.items():
        init, step = zf.train_step(loss, zf.adamw(0.05), zf.Mesh(dp=2), stage=3, frozen=["0.*"])
        state, found = init(given), []
        for _ in range(10):
            state, metrics = step(state, (x, y))
            found.append(float(metrics["loss"]))
        losses[name] = found
    assert losses["quantised"][-1] < 0.8 * losses["quantised"][0]
    torch.testing.assert_close(losses["quantised"], losses["plain"], rtol=1e-3, atol=1e-3)


def test_threads_take_turns() -> None:
    """A call of one thread sees nothing of another's values."""

    class Slow(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            time.sleep(0.005)
            return super().forward(x)

    _, apply = zf.from_module(Slow(4, 4, bias=False))
    x, wrong = torch.eye(4), []

    def client(number: int) -> None:
        weight: Any = {"weight": torch.full((4, 4), float(number))}
        weight = zf.quantize(weight) if number % 2 else weight
        for _ in range(10):
            if not torch.allclose(apply(weight, x), torch.tensor(float(number)), rtol=1e-2):
                wrong.append(number)

    threads = [threading.Thread(target=client, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_models(kind: str, method: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=211, n_positions=64, n_embd=64, n_layer=2, n_head=4
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=211, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    tokens = TOKENS.repeat(1, 4) * 17 % 211
    original = copy.deepcopy(model.state_dict())
    params, apply = zf.from_module(model.eval())
    q = zf.quantize(params, method)
    assert sum(isinstance(x, zf.Quantized) for x in q.values()) >= 8
    with torch.no_grad():
        want = model(tokens).logits
        found = apply(q, tokens).logits
        exact = apply(zf.dequantize(q), tokens).logits
    assert (found - exact).norm() < COMPUTED * exact.norm()
    assert (found - want).norm() < ERROR[method] * want.norm()
    torch.testing.assert_close(model.state_dict(), original, rtol=0, atol=0)
