"""torch.nn modules, and transformers' GPT-2 and Llama, on quantised weights."""

from typing import Any

import pytest
import torch

import zero_fn as zf
from zero_fn.inference.module_calls import functional_call

# Of the logits' norm. Rounding a weight changes it by 1, 3 and 8 %, of which a few layers make more
# (measured over two seeds: 1.0, 4.6 and 17 %).
ERROR = {"int8": 0.03, "fp8": 0.08, "int4": 0.25}


def test_a_module_computes_on_them_and_is_left_as_it_was() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(13, 8)
            self.norm = torch.nn.LayerNorm(8)
            self.head = torch.nn.Linear(8, 13, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.embedding(tokens)))

    module, tokens = Tied(), torch.arange(6).view(2, 3)
    before = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    for names in (True, False):
        params = dict(module.named_parameters(remove_duplicate=names))
        q = zf.quantize(params)
        found = functional_call(module, q, tokens)
        want = torch.func.functional_call(module, zf.dequantize(q), (tokens,), tie_weights=names)
        torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    with pytest.raises(RuntimeError):
        functional_call(module, q, tokens.float())
    after = {name: id(p) for name, p in module.named_parameters(remove_duplicate=False)}
    assert list(after.items()) == list(before.items())
    with pytest.raises(ValueError, match="has no parameter 'tail'"):
        functional_call(module, {"tail": torch.ones(1)}, tokens)
    with pytest.raises(ValueError, match=r"shape \(12, 8\)"):
        functional_call(module, {"head.weight": zf.quantize(torch.ones(12, 8))}, tokens)


@pytest.mark.parametrize("method", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_models(kind: str, method: Any) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=211, n_positions=64, n_embd=64, n_layer=2, n_head=4,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.LlamaConfig(
            vocab_size=211, hidden_size=64, intermediate_size=160, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config)
    model.eval()
    tokens = torch.arange(40).view(2, 20) * 7 % 211
    params = dict(model.named_parameters())
    q = zf.quantize(params, method)
    with torch.no_grad():
        want = model(tokens).logits
        found = functional_call(model, q, tokens).logits
        exact = torch.func.functional_call(model, zf.dequantize(q), (tokens,)).logits
    # Inputs in two digits of int8, and sums in another order.
    assert (found - exact).norm() < 1e-3 * exact.norm()
    assert (found - want).norm() < ERROR[method] * want.norm()
