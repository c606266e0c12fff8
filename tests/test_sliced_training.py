"""The GPT on slices, dp × tp, against a dense step in plain torch; what it sends."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zero_fn as zf
from zero_fn import tree
from zero_fn.models import gpt

from .processes import run_on_processes

CLIP = 0.5
STEPS = 3


def configuration(**changes: Any) -> gpt.Config:
    """A vocabulary that no axis divides."""
    return gpt.Config(
        **{"vocabulary": 11, "length": 8, "layers": 1, "heads": 8, "width": 16} | changes
    )


def parameters(config: gpt.Config) -> gpt.Params:
    """In float64, none of them zero or one, and tied where the configuration says so."""
    generator = torch.Generator().manual_seed(3)
    params = tree.map(
        lambda x: x.double() + 0.2 * torch.randn(x.shape, generator=generator, dtype=torch.float64),
        gpt.init(config),
    )
    if config.tied:
        params["head"] = params["tokens"]
    return params


def batch(config: gpt.Config, seed: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocabulary, (rows, config.length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def dense_loss(params: gpt.Params, batch: tuple[Tensor, Tensor], config: gpt.Config) -> Tensor:
    """The same GPT in plain torch."""
    tokens, targets = batch

    def norm(x: Tensor, w: Any) -> Tensor:
        return F.layer_norm(x, (config.width,), w["scale"], w["shift"])

    def linear(x: Tensor, w: Any) -> Tensor:
        return x @ w["weight"].T + w["bias"]

    def heads(x: Tensor, count: int) -> Tensor:
        return x.reshape(*x.shape[:2], count, -1).transpose(1, 2)

    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    for block in params["blocks"]:
        q, k, v = linear(norm(x, block["norm1"]), block["qkv"]).split(config.qkv, -1)
        q, k, v = heads(q, config.heads), heads(k, config.groups), heads(v, config.groups)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + linear(y.transpose(1, 2).flatten(2), block["out"])
        hidden = F.gelu(linear(norm(x, block["norm2"]), block["up"]), approximate="tanh")
        x = x + linear(hidden, block["down"])
    logits = norm(x, params["norm"]) @ params["head"].T
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def dense_run(config: gpt.Config) -> tuple[list[float], gpt.Params]:
    """torch.autograd and torch.optim alone."""
    params = tree.map(lambda x: x.requires_grad_(), parameters(config))
    leaves = list({id(x): x for x in tree.leaves(params)}.values())
    optimizer = torch.optim.AdamW(leaves, lr=1e-2, weight_decay=0.1)
    losses = []
    for seed in range(STEPS):
        loss = dense_loss(params, batch(config, seed), config)
        optimizer.zero_grad()
        loss.backward()
        assert torch.nn.utils.clip_grad_norm_(leaves, CLIP) > CLIP
        optimizer.step()
        losses.append(loss.item())
    return losses, tree.map(lambda x: x.detach(), params)


def sliced_run(
    config: gpt.Config,
    sizes: dict[str, int],
    stage: int,
    sequence_parallel: bool = False,
    microbatches: int = 1,
) -> tuple[list[float], gpt.Params]:
    """The same by ``train_step``, on whatever the mesh binds to."""
    mesh = zf.Mesh(**sizes)

    def loss_fn(params: gpt.Params, batch: Any) -> Tensor:
        return gpt.loss(params, batch, config, "tp", sequence_parallel)

    init, step = zf.train_step(
        loss_fn,
        zf.adamw(1e-2, weight_decay=0.1),
        mesh,
        stage=stage,
        microbatches=microbatches,
        clip=CLIP,
        slice_rules=gpt.rules(config),
    )
    state, losses = init(parameters(config)), []
    for seed in range(STEPS):
        state, metrics = step(state, batch(config, seed))
        losses.append(metrics["loss"].item())
    return losses, zf.gather_tree(state.params, mesh)


def written_by_hand(
    config: gpt.Config, sizes: dict[str, int], stage: int, sequence_parallel: bool = False
) -> tuple[list[float], gpt.Params]:
    """The same step as the README writes it, untraced."""
    mesh = zf.Mesh(**sizes)
    optimizer = zf.chain(zf.clip_by_global_norm(CLIP), zf.adamw(1e-2, weight_decay=0.1))

    def init(params: Any) -> zf.TrainState:
        params = zf.shard(zf.slice_params(params, gpt.rules(config)), stage)
        return zf.TrainState(params, optimizer.init(params))

    def step(state: zf.TrainState, batch: Any) -> tuple[zf.TrainState, Tensor]:
        def loss(params: Any) -> Tensor:
            params = zf.local_slices(zf.unshard(params))
            return zf.pmean(gpt.loss(params, batch, config, "tp", sequence_parallel), "dp")

        grads, value = zf.grad_and_value(loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return zf.TrainState(zf.apply_updates(state.params, updates), opt_state), value

    state, losses = zf.spmd(init, mesh)(parameters(config)), []
    for seed in range(STEPS):
        state, value = zf.spmd(step, mesh)(state, batch(config, seed))
        losses.append(value.item())
    return losses, zf.gather_tree(state.params, mesh)


# float64: AdamW's first steps divide small gradients by their size, so that 1e-16 grows to 1e-10
CLOSE: Any = {"rtol": 1e-9, "atol": 1e-9}


@pytest.fixture(scope="module")
def dense() -> Any:
    return dense_run(configuration())


@pytest.mark.parametrize("changes", [{}, {"kv_heads": 2, "layers": 2}, {"tied": False}])
def test_without_an_axis_it_is_the_dense_model(changes: Any) -> None:
    config = configuration(**changes)
    params, tokens = parameters(config), batch(config, 0)
    assert config.parameters == sum({id(x): x.numel() for x in tree.leaves(params)}.values())
    got = zf.grad_and_value(lambda p: gpt.loss(p, tokens, config))(params)
    want = zf.grad_and_value(lambda p: dense_loss(p, tokens, config))(params)
    # float64, sums of a few dozen terms
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("sizes", [(2, 1), (1, 2), (2, 2), (2, 4), (4, 2), (1, 8)])
def test_simulated_ranks_train_like_the_dense_step(
    sizes: tuple[int, int], stage: int, dense: Any
) -> None:
    run = written_by_hand(configuration(), {"dp": sizes[0], "tp": sizes[1]}, stage)
    torch.testing.assert_close(run, dense, **CLOSE)


@pytest.mark.parametrize(
    ("sizes", "stage"), [({"tp": 4, "dp": 2}, 3), ({"dp": 2, "tp": 2}, 0), ({"dp": 1, "tp": 8}, 1)]
)
def test_sequence_parallelism_trains_like_the_dense_step(
    sizes: Any, stage: int, dense: Any
) -> None:
    run = written_by_hand(configuration(), sizes, stage, sequence_parallel=True)
    torch.testing.assert_close(run, dense, **CLOSE)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("changes", [{"kv_heads": 2}, {"tied": False, "layers": 2, "kv_heads": 4}])
def test_fewer_key_and_value_heads(changes: Any, sequence_parallel: bool) -> None:
    config = configuration(**changes)
    run = written_by_hand(config, {"dp": 2, "tp": 2}, 2, sequence_parallel)
    torch.testing.assert_close(run, dense_run(config), **CLOSE)


@pytest.mark.parametrize(
    ("stage", "sequence_parallel", "microbatches"), [(2, False, 2), (3, True, 2)]
)
def test_the_traced_step_of_train_step(
    stage: int, sequence_parallel: bool, microbatches: int, dense: Any
) -> None:
    sizes = {"dp": 2, "tp": 2}
    run = sliced_run(configuration(), sizes, stage, sequence_parallel, microbatches)
    torch.testing.assert_close(run, dense, **CLOSE)


def test_a_sweep_over_whole_states() -> None:
    """vmap over the traced step: three states in, three states out."""
    config, mesh = configuration(), zf.Mesh(dp=2, tp=2)
    init, step = zf.train_step(
        lambda p, b: gpt.loss(p, b, config, "tp"),
        zf.adamw(1e-2),
        mesh,
        stage=3,
        clip=CLIP,
        donate=False,
        slice_rules=gpt.rules(config),
    )
    states = [init(tree.map(torch.Tensor.double, gpt.init(config, seed))) for seed in range(3)]
    stacked = tree.map(lambda *xs: torch.stack(xs), *states)
    together, metrics = torch.func.vmap(step, (0, None))(stacked, batch(config, 0))
    for place, state in enumerate(states):
        alone, want = step(state, batch(config, 0))
        torch.testing.assert_close(metrics["loss"][place], want["loss"])
        for x, y in zip(tree.leaves(together), tree.leaves(alone), strict=True):
            torch.testing.assert_close(x[place], y, **CLOSE)


@pytest.mark.parametrize("stage", [0, 2])
def test_two_processes_train_like_the_dense_step(stage: int, dense: Any) -> None:
    for run in run_on_processes(2, sliced_run, configuration(), {"dp": 1, "tp": 2}, stage):
        torch.testing.assert_close(run, dense, **CLOSE)


@pytest.mark.parametrize(("stage", "sequence_parallel"), [(1, False), (3, True)])
def test_four_processes_train_like_the_dense_step(
    stage: int, sequence_parallel: bool, dense: Any
) -> None:
    sizes = {"dp": 2, "tp": 2}
    args = (configuration(), sizes, stage, sequence_parallel)
    for run in run_on_processes(4, sliced_run, *args):
        torch.testing.assert_close(run, dense, **CLOSE)


@pytest.mark.slow
def test_eight_processes_train_like_the_dense_step(dense: Any) -> None:
    for run in run_on_processes(8, sliced_run, configuration(), {"dp": 2, "tp": 4}, 3, True):
        torch.testing.assert_close(run, dense, **CLOSE)


def sent(sequence_parallel: bool, vocabulary: int) -> tuple[list[tuple[str, int, int]], int]:
    """The collectives over tp of a step, as (kind, calls, bytes put in); an activation's bytes."""
    config = configuration(vocabulary=vocabulary, layers=3)
    mesh = zf.Mesh(dp=2, tp=4).abstract()
    init, step = zf.train_step(
        lambda p, b: gpt.loss(p, b, config, "tp", sequence_parallel),
        zf.sgd(0.1),
        mesh,
        slice_rules=gpt.rules(config),
    )
    program = step.trace(init(gpt.init(config)), batch(config, 0))  # type: ignore[attr-defined]
    found = [c for c in program.collectives() if c.axis == "tp"]
    return sorted(
        (c.kind, c.calls, c.bytes_in) for c in found
    ), 4 * config.length * config.width * 4


@pytest.mark.parametrize("vocabulary", [11, 5000])
def test_what_a_step_sends_over_tp(vocabulary: int) -> None:
    """Megatron's count: an activation four times a block, and once each for embedding and head.

    Of a token's logits, two numbers.
    """
    found, activation = sent(False, vocabulary)
    reductions = 4 * 3 + 2
    tokens = 4 * 8
    assert found == [
        ("all_gather", 1, 2 * tokens * 4),
        ("all_reduce", reductions, reductions * activation),
    ]


def test_what_sequence_parallelism_sends() -> None:
    """A gather and a scatter in place of each reduction, and no logits."""
    found, activation = sent(True, 5000)
    count = 4 * 3 + 2
    sizes = {kind: (calls, size) for kind, calls, size in found}
    assert sizes["reduce_scatter"] == (count, count * activation)
    # beside them the loss' two numbers a token, and, in a bucket with another, the positions'
    # gradient
    assert sizes["all_gather"][0] == count + 1
    positions, tokens = 8 * 16, 4 * 8
    assert sizes["all_gather"][1] == count * activation // 4 + 2 * tokens * 4 + positions * 4 // 4


@pytest.mark.parametrize(
    ("changes", "call", "message"),
    [
        ({"heads": 2}, {}, "heads=2 is not divisible by the 4 ranks of 'tp'"),
        ({"kv_heads": 2}, {}, "kv_heads=2 is not divisible by the 4 ranks of 'tp'"),
        (
            {"length": 6},
            {"sequence_parallel": True},
            "the sequence's length=6 is not divisible by the 4 ranks of 'tp'",
        ),
        (
            {},
            {"axis": None, "sequence_parallel": True},
            "sequence_parallel cuts the sequence over an axis; name it: axis='tp'",
        ),
    ],
)
def test_a_model_that_the_axis_does_not_divide_is_refused(
    changes: Any, call: Any, message: str
) -> None:
    config = configuration(**changes)

    def program(params: Any, batch: Any) -> Tensor:
        params = zf.local_slices(zf.slice_params(params, gpt.rules(config)))
        return gpt.loss(params, batch, config, **({"axis": "tp"} | call))

    with pytest.raises(ValueError, match=message):
        zf.spmd(program, zf.Mesh(tp=4))(parameters(config), batch(config, 0))


@pytest.mark.parametrize("kv_heads", [0, 3])
def test_key_and_value_heads_that_do_not_divide_the_heads_are_refused(kv_heads: int) -> None:
    with pytest.raises(ValueError, match=f"kv_heads={kv_heads} does not divide heads=8"):
        configuration(kv_heads=kv_heads)
