"""The GPT with a sparse layout: the GPT with a dense mask, in every way that a step runs."""

import copy
import dataclasses
import functools
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.kernels import Layout
from zero_fn.models import gpt

LENGTH = 72  # no multiple of the block
LAYOUTS = {
    "shared": Layout.bigbird(LENGTH, seed=3),
    "per head": Layout.fixed(
        LENGTH,
        num_heads=2,
        num_local_blocks=2,
        num_different_global_patterns=2,
        different_layout_per_head=True,
    ),
    "document": Layout.document([33, 20, 19]),
}


def config(layout: Layout) -> gpt.Config:
    return gpt.Config(vocabulary=19, length=LENGTH, width=16, attention=layout)


def double(params: Any) -> Any:
    return tree.map(Tensor.double, params)


def batch(rows: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(19, (rows, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def masked(layout: Layout) -> gpt.Attend:
    """Attention with all scores, of which those that the layout or the order hides are masked."""
    return functools.partial(F.scaled_dot_product_attention, attn_mask=layout.to_dense().tril())


@pytest.mark.parametrize("name", LAYOUTS)
def test_equals_the_dense_mask(name: str) -> None:
    of = config(LAYOUTS[name])
    params = double(gpt.init(of))

    def sparse(params: Any) -> Tensor:
        return gpt.loss(params, batch(3), of)

    def dense(params: Any) -> Tensor:
        return gpt.loss(params, batch(3), dataclasses.replace(of, attention=masked(LAYOUTS[name])))

    grads, value = zf.grad_and_value(sparse)(params)
    want, wanted = zf.grad_and_value(dense)(params)
    torch.testing.assert_close(value, wanted)
    torch.testing.assert_close(tree.leaves(grads), tree.leaves(want))


@pytest.mark.parametrize("stage", [0, 3])
def test_sharded_and_traced_steps_equal_a_dense_run(stage: int) -> None:
    layout = LAYOUTS["per head"]
    of = config(layout)
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(lambda p, b: gpt.loss(p, b, of), zf.adamw(1e-2), mesh, stage=stage)
    state = init(double(gpt.init(of)))

    params = tree.map(Tensor.requires_grad_, double(gpt.init(of)))
    leaves = list({id(x): x for x in tree.leaves(params)}.values())
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.01)
    for seed in range(3):
        state, metrics = step(state, batch(4, seed))
        loss = gpt.loss(params, batch(4, seed), dataclasses.replace(of, attention=masked(layout)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(metrics["loss"], loss.detach())


def test_jit_is_one_op_a_layer_and_direction() -> None:
    of = config(LAYOUTS["shared"])
    params = double(gpt.init(of))
    run = zf.jit(lambda p, b: zf.grad_and_value(lambda p: gpt.loss(p, b, of))(p))
    grads, _ = run(params, batch(2))
    want, _ = zf.grad_and_value(lambda p: gpt.loss(p, batch(2), of))(params)
    torch.testing.assert_close(tree.leaves(grads), tree.leaves(want))
    graph = run.trace(params, batch(2)).graph_module.graph
    ops = [str(node.target) for node in graph.nodes if "block_sparse" in str(node.target)]
    assert len(ops) == 2 * of.layers, ops


def test_equal_configurations_are_one_key() -> None:
    """Equal layouts are one object, so that a configuration hashes and compares by value."""
    one, other = config(Layout.bigbird(LENGTH, seed=3)), config(LAYOUTS["shared"])
    assert one == other
    assert hash(one) == hash(other)
    assert copy.deepcopy(one) == pickle.loads(pickle.dumps(one)) == one
    assert one != config(LAYOUTS["document"])
    assert one != gpt.Config(vocabulary=19, length=LENGTH, width=16)


@dataclass
class Model:
    params: Any
    config: gpt.Config


zf.register_dataclass(Model, static=("config",))


def test_a_layout_is_a_static_field_of_a_traced_argument() -> None:
    runs = []

    def loss(model: Model, batch: Any) -> Tensor:
        runs.append(model.config)
        return gpt.loss(model.params, batch, model.config)

    run = zf.jit(loss)
    values = []
    for layout in (LAYOUTS["shared"], Layout.bigbird(LENGTH, seed=3), LAYOUTS["document"]):
        params = double(gpt.init(config(layout)))
        values.append(run(Model(params, config(layout)), batch(2)))
        of = dataclasses.replace(config(layout), attention=masked(layout))
        want = gpt.loss(params, batch(2), of)
        torch.testing.assert_close(values[-1], want)
    assert len(runs) == 2  # the second layout is the first one
    assert values[0] == values[1] != values[2]


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        ("bigbird", r"attention='bigbird'; 'dense' or a Layout: Layout.bigbird\(72"),
        (Layout.dense(LENGTH, k_len=20), "as many keys as queries"),
        (Layout.dense(LENGTH + 1), "at most length=72"),
        (Layout.dense(LENGTH, num_heads=3), "for any heads, or 2"),
    ],
    ids=str,
)
def test_errors(attention: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config(attention)


def test_a_sequence_of_another_length_is_refused() -> None:
    of = config(LAYOUTS["shared"])
    with pytest.raises(ValueError, match="20 queries and 20 keys, but the layout is for 72 and 72"):
        gpt.apply(gpt.init(of), batch(1)[0][:, :20], of)
