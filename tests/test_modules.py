"""torch.nn modules that nobody here wrote, trained like the plain torch loop trains them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zero_fn as zf

from .processes import run_on_processes

LENGTH = 10


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 12, "n_layer": 2, "n_head": 3}
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, **ends))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 1, "max_position_embeddings": 16}
    ends = {"bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **ends, tie_word_embeddings=True))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"vocab_size": 31, "hidden_size": 12, "intermediate_size": 20, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 3, "max_position_embeddings": 16}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**sizes, **heads, **drops))


class ResNet(nn.Module):
    """A residual block with batch norms, as torchvision's BasicBlock, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(6)
        self.downsample = nn.Sequential(nn.Conv2d(3, 6, 1, bias=False), nn.BatchNorm2d(6))
        self.fc = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)) + self.downsample(x))
        return self.fc(h.mean((2, 3)))


LANGUAGE = {"gpt2": gpt2, "llama": llama, "bert": bert}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def language_loss(model: Callable[..., Any], name: str) -> Callable[..., Tensor]:
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    mask = (mask if name == "bert" else mask.tril())[None, None]

    def loss(*args: Any) -> Tensor:
        *params, ids = args
        out: Tensor = model(*params, input_ids=ids, attention_mask=mask, labels=ids).loss
        return out

    return loss


def token_batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 31, (8, LENGTH), generator=generator) for _ in range(5)]


def plain_language(name: str) -> tuple[list[float], dict[str, Tensor]]:
    module = seeded(LANGUAGE[name])
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
    losses = []
    for ids in token_batches():
        loss = language_loss(module, name)(ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in module.named_parameters()}


def sharded_language(name: str, stage: int) -> tuple[list[float], dict[str, Tensor]]:
    module = seeded(LANGUAGE[name])
    params, apply = zf.from_module(module)
    mesh = zf.Mesh(dp=2)
    optimizer = zf.adamw(1e-2, weight_decay=0.1)
    init, step = zf.train_step(language_loss(apply, name), optimizer, mesh, stage=stage)
    state, losses = init(params), []
    for ids in token_batches():
        state, metrics = step(state, ids)
        losses.append(metrics["loss"].item())
    zf.to_module(module, zf.gather_tree(state.params, mesh))
    if name != "bert":  # tied weights are one tensor still
        assert module.get_input_embeddings().weight is module.get_output_embeddings().weight
    return losses, {n: p.detach() for n, p in module.named_parameters()}


def assert_close(got: Any, want: Any) -> None:
    # float32, other orders of summation, over five steps of Adam
    torch.testing.assert_close(torch.tensor(got[0]), torch.tensor(want[0]), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "stage"), [("gpt2", 3), ("llama", 1), ("bert", 0)])
def test_transformers_train_as_they_do(name: str, stage: int) -> None:
    assert_close(sharded_language(name, stage), plain_language(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", LANGUAGE)
def test_transformers_train_at_every_stage(name: str) -> None:
    want = plain_language(name)
    for stage in range(4):
        assert_close(sharded_language(name, stage), want)
        for rank in run_on_processes(2, sharded_language, name, stage):
            assert_close(rank, want)


def image_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        (
            torch.randn(8, 3, 6, 6, generator=generator),
            torch.randint(0, 5, (8,), generator=generator),
        )
        for _ in range(5)
    ]


def plain_resnet(parts: int) -> tuple[list[float], dict[str, Tensor]]:
    """Each part of a batch by a copy of the module, as DDP's ranks; buffers averaged after."""
    module = seeded(ResNet)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, y in image_batches():
        optimizer.zero_grad()
        total, found = 0.0, []
        before = {n: b.clone() for n, b in module.named_buffers()}
        for rows, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
            for n, b in module.named_buffers():
                b.copy_(before[n])
            loss = F.cross_entropy(module(rows), labels) / parts
            loss.backward()
            total += loss.item()
            found.append({n: b.clone() for n, b in module.named_buffers()})
        for n, b in module.named_buffers():
            b.copy_(torch.stack([copy[n].double() for copy in found]).mean(0).to(b.dtype))
        optimizer.step()
        losses.append(total)
    return losses, {n: x.detach() for n, x in module.state_dict().items()}


def sharded_resnet(stage: int, together: bool, microbatches: int = 1) -> Any:
    module = seeded(ResNet)
    over = {"normalize_over": "dp"} if together else {"average_over": "dp"}
    params, apply = zf.from_module(module, **over)
    mesh = zf.Mesh(dp=2)

    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        out, buffers = apply(params, batch[0], buffers=buffers)
        return F.cross_entropy(out, batch[1]), buffers

    init, step = zf.train_step(
        loss,
        zf.sgd(0.1, momentum=0.9),
        mesh,
        stage=stage,
        buffers=apply.buffers,
        microbatches=microbatches,
    )
    state, losses = init(params), []
    for batch in image_batches():
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())
    zf.to_module(module, zf.gather_tree(state.params, mesh), state.buffers)
    return losses, {n: x.detach() for n, x in module.state_dict().items()}


@pytest.mark.parametrize("together", [False, True])
def test_batch_norm(together: bool) -> None:
    """Running statistics averaged is a loop over parts; rows normalized together, the whole."""
    want = plain_resnet(1 if together else 2)
    assert_close(sharded_resnet(3, together), want)
    for rank in run_on_processes(2, sharded_resnet, 1, together):
        assert_close(rank, want)


@pytest.mark.slow
@pytest.mark.parametrize("together", [False, True])
def test_batch_norm_at_every_stage(together: bool) -> None:
    want = plain_resnet(1 if together else 2)
    for stage in range(4):
        assert_close(sharded_resnet(stage, together), want)
        for rank in run_on_processes(2, sharded_resnet, stage, together):
            assert_close(rank, want)


def test_running_statistics_go_from_microbatch_to_microbatch() -> None:
    module = seeded(ResNet)
    x = image_batches()[0][0]
    _, apply = zf.from_module(module)
    params, buffers = zf.from_module(module).params, apply.buffers
    for rows in x.chunk(2):
        module(rows)
        _, buffers = apply(params, rows, buffers=buffers)
    torch.testing.assert_close(buffers, dict(module.named_buffers()))
    assert int(buffers["bn1.num_batches_tracked"]) == 2
    assert int(apply.buffers["bn1.num_batches_tracked"]) == 0
    torch.testing.assert_close(apply.eval()(params, x, buffers=buffers)[0], module.eval()(x))
    assert apply.eval()(params, x, buffers=buffers)[1].keys() == buffers.keys()


def test_running_statistics_that_nobody_averaged_are_refused() -> None:
    params, apply = zf.from_module(seeded(ResNet))

    def loss(params: Any, batch: Any, buffers: Any) -> Any:
        out, buffers = apply(params, batch[0], buffers=buffers)
        return F.cross_entropy(out, batch[1]), buffers

    init, step = zf.train_step(loss, zf.sgd(0.1), zf.Mesh(dp=2), buffers=apply.buffers)
    with pytest.raises(ValueError, match=r"buffers.bn1.running_mean' varies over axis 'dp'"):
        step(init(params), image_batches()[0])


class Drops(nn.Module):
    """Every kind of dropout that draws from a key."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.conv = nn.Conv1d(6, 6, 1)
        self.channels, self.values = nn.Dropout1d(0.4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x, need_weights=False)[0]
        return self.values(self.channels(self.conv(h.transpose(1, 2))))


def test_dropout_draws_from_the_key() -> None:
    params, apply = zf.from_module(seeded(Drops))
    x, key = torch.randn(8, 5, 6), zf.random.key(0)
    state = torch.get_rng_state()
    once = apply(params, x, dropout_key=key)
    assert torch.equal(once, apply(params, x, dropout_key=key))
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(once, apply(params, x, dropout_key=zf.random.key(1)))
    torch.testing.assert_close(apply.eval()(params, x), seeded(Drops).eval()(x))
    with pytest.raises(ValueError, match="Drops draws dropout, and has no key"):
        apply(params, x)
    # whole channels, and single values in the others
    channels = (once == 0).all(-1)
    assert 0.2 < channels.double().mean() < 0.6
    assert 0.1 < (once[~channels] == 0).double().mean() < 0.3
    # in a mean over many keys each value is what it is without dropout of values and channels
    conv = nn.Sequential(nn.Conv1d(6, 6, 1), nn.Dropout1d(0.4), nn.Dropout(0.2))
    params, apply = zf.from_module(conv)
    y = x.transpose(1, 2)
    keys = zf.random.split(key, 800)
    mean = torch.func.vmap(lambda k: apply(params, y, dropout_key=k))(keys).mean(0)
    want = apply.eval()(params, y)
    # five standard errors: each value is 0 or 1/0.48 times itself
    assert ((mean - want).abs() <= 5 * want.abs() * ((1 / 0.48 - 1) / 800) ** 0.5 + 1e-6).all()


def test_attention_with_dropout_is_torchs_without() -> None:
    q, k, v = torch.randn(3, 2, 4, 5, 6)
    mask = torch.randn(5, 5)

    class Attention(nn.Module):
        def forward(self, p: float, **options: Any) -> Tensor:
            kv = {"enable_gqa": True} if options.get("enable_gqa") else {}
            keys, values = (k[:, :2], v[:, :2]) if kv else (k, v)
            return F.scaled_dot_product_attention(q, keys, values, dropout_p=p, **options)

    _, apply = zf.from_module(Attention())
    cases: list[dict[str, Any]] = [
        {},
        {"is_causal": True},
        {"attn_mask": mask},
        {"attn_mask": mask > -1, "scale": 0.3},
        {"enable_gqa": True},
    ]
    for options in cases:
        # a rate so small that nothing is dropped (p < 2^-24 keeps all)
        got = apply({}, 1e-9, dropout_key=zf.random.key(0), **options)
        torch.testing.assert_close(got, Attention()(0.0, **options))


def dropout_run(stage: int) -> Any:
    params, apply = zf.from_module(seeded(Drops))
    mesh = zf.Mesh(dp=2)

    def loss(params: Any, x: Tensor, dropout_key: Tensor) -> Tensor:
        return zf.remat(apply)(params, x, dropout_key=dropout_key).square().mean()

    init, step = zf.train_step(
        loss, zf.sgd(0.1), mesh, stage=stage, microbatches=2, dropout_key=zf.random.key(3)
    )
    state, losses = init(params), []
    for i in range(3):
        state, metrics = step(state, zf.random.normal(zf.random.key(i), (8, 5, 6)))
        losses.append(metrics["loss"].item())
    return losses, zf.gather_tree(state.params, mesh)


def test_dropout_in_a_step_is_the_same_everywhere() -> None:
    runs = [dropout_run(stage) for stage in (0, 3)] + run_on_processes(2, dropout_run, 2)
    for run in runs[1:]:
        assert_close(run, runs[0])
    assert len(set(runs[0][0])) == 3


class Shared(nn.Module):
    """The same module at two places, a tied weight, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.again = self.first
        self.embed = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(5)
        self.norm.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.again(torch.tanh(self.first(self.embed(ids))))))


def test_shared_tied_and_frozen_parameters() -> None:
    module, ids = seeded(Shared), torch.randint(0, 7, (4, 3))
    before = copy.deepcopy(module.state_dict())
    params, apply = zf.from_module(module)
    assert sorted(params) == [
        *("embed.weight", "first.bias", "first.weight", "norm.bias", "norm.weight")
    ]
    assert apply.frozen == ("norm.weight",)
    assert torch.equal(apply(params, ids), module(ids))
    grads = zf.grad(lambda p: apply(p, ids).square().mean())(params)
    module(ids).square().mean().backward()
    for name, p in module.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(grads[name], p.grad)
    mesh = zf.Mesh(dp=2)
    init, step = zf.train_step(
        lambda p, ids: apply(p, ids).square().mean(),
        zf.adamw(1e-2),
        mesh,
        stage=2,
        frozen=apply.frozen,
    )
    state, _ = step(init(params), ids)
    zf.to_module(module, zf.gather_tree(zf.merge(state.params, state.frozen), mesh))
    after = module.state_dict()
    changed = {n for n in after if not torch.equal(after[n], before[n])}
    assert changed == set(after) - {"norm.weight"}
    assert module.head.weight is module.embed.weight


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if (x > 0).all() else -x


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


def test_errors() -> None:
    linear = nn.Linear(3, 2)
    params, apply = zf.from_module(linear)
    x = torch.ones(4, 3)
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, and got 3"):
        zf.from_module(3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"params lacks 'bias'; it has \['weight'\]"):
        apply({"weight": params["weight"]}, x)
    with pytest.raises(ValueError, match="params has 'extra', which the module has not"):
        zf.to_module(linear, {**params, "extra": x})
    with pytest.raises(
        ValueError, match=r"at 'weight' has shape \(3, 2\); the module's is \(2, 3\)"
    ):
        zf.to_module(linear, {**params, "weight": params["weight"].T})
    pieces = zf.spmd(lambda p: zf.shard(p, 1), zf.Mesh(dp=2))(params)
    with pytest.raises(ValueError, match=r"no whole tensor; zf\.unshard"):
        apply(pieces, x)
    _, noisy = zf.from_module(Noisy())
    with pytest.raises(NotImplementedError, match="Noisy draws random numbers by randn_like"):
        noisy({}, x)
    _, branches = zf.from_module(Branches())
    with pytest.raises(RuntimeError, match="Branches branches on the values of a tensor"):
        zf.spmd(lambda _, x: branches({}, x), zf.Mesh(dp=2))(None, x)
    with pytest.raises(ValueError, match="'weight' has no shape yet; run the module once"):
        zf.from_module(nn.LazyLinear(2))
