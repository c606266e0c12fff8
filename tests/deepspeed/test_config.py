"""DeepSpeed's configurations: what becomes of each key, and steps equal to plain ones."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_fn as zf
from zero_fn.kernels import Layout

ZERO2: dict[str, Any] = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-2, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 3e-2},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-2, "warmup_num_steps": 4},
    },
}
FP16 = {
    "enabled": True, "loss_scale": 0, "initial_scale_power": 8, "loss_scale_window": 500,
    "hysteresis": 3, "min_loss_scale": 0,
}  # fmt: skip


def loss_fn(params: Any, batch: Any) -> Tensor:
    x, y = batch
    return (torch.tanh(x @ params["hidden"]) @ params["out"] - y).square().mean()


def new_params() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "hidden": torch.randn(5, 7, dtype=torch.float64),
        "out": torch.randn(7, 1, dtype=torch.float64),
    }


def batches(count: int, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(count, rows, 5, dtype=torch.float64)
    return [(each, each.sum(-1, keepdim=True)) for each in x]


def dense_losses(optimizer: Any, schedule: Any, clip: float, count: int) -> list[float]:
    """The same run by torch.optim, without this library's steps."""
    params = {name: x.requires_grad_() for name, x in new_params().items()}
    made = optimizer(params.values())
    found = []
    for step, batch in enumerate(batches(count)):
        for group in made.param_groups:
            group["lr"] = schedule(step)
        loss = loss_fn(params, batch)
        made.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*params.values()], clip)
        made.step()
        found.append(loss.item())
    return found


def test_the_step_is_the_plain_one() -> None:
    read = zf.from_deepspeed(ZERO2, ranks=4)
    assert read.axes == {"dp": 4}
    assert read.batch == 16
    assert read.arguments == {"stage": 2, "clip": 1.0, "microbatches": 2}
    init, step = read.train_step(loss_fn, zf.Mesh(**read.axes))
    state, losses = init(new_params()), []
    for batch in batches(6):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())

    def adamw(params: Any) -> Any:
        return torch.optim.AdamW(params, betas=(0.8, 0.99), eps=1e-6, weight_decay=3e-2)

    rate = zf.warmup_lr(0, 1e-2, 4)
    expected = dense_losses(adamw, lambda t: rate(torch.tensor(t)).item(), 1.0, 6)
    # the rate is float32 in both; sums run in other orders
    assert losses == pytest.approx(expected, rel=1e-6)


def test_every_key_is_read_or_has_a_reason() -> None:
    read = zf.from_deepspeed(ZERO2, ranks=4)
    flat = {
        "zero_optimization.overlap_comm", "steps_per_print", "wall_clock_breakdown",
    }  # fmt: skip
    assert flat <= set(read.unsupported)
    assert read.places == {"opt_state.*": "cpu"}

    def names(config: dict[str, Any], prefix: str = "") -> set[str]:
        found: set[str] = set()
        for key, value in config.items():
            below = isinstance(value, dict) and value
            found |= names(value, f"{prefix}{key}.") if below else {prefix + key}
        return found

    assert names(ZERO2) == set(read.read) | set(read.unsupported)
    assert not set(read.read) & set(read.unsupported)
    assert "no counterpart: " in str(read)


def test_unknown_keys_are_told_with_the_nearest_known() -> None:
    config = copy.deepcopy(ZERO2)
    config["gradient_cliping"] = 1.0
    config["zero_optimization"]["overlap_com"] = True
    config["optimizer"]["params"]["beta"] = 0.9
    with pytest.raises(
        ValueError, match=r"gradient_cliping.*did you mean 'gradient_clipping'"
    ) as e:
        zf.from_deepspeed(config)
    assert "did you mean 'overlap_comm'" in str(e.value)
    assert "'optimizer.params.beta'" in str(e.value)


def test_precision() -> None:
    read = zf.from_deepspeed({"fp16": FP16, "communication_data_type": "fp16"})
    scale = read.arguments["loss_scale"]
    assert scale == zf.LossScale(256.0, 2.0, 500, 2.0**-24, 3, False)
    assert read.arguments["policy"] == zf.policy(compute="fp16", reduce="fp16")
    static = zf.from_deepspeed({"fp16": {**FP16, "loss_scale": 128}}).arguments["loss_scale"]
    assert (static.initial, static.factor) == (128, 1)
    bf16 = zf.from_deepspeed({"bf16": {"enabled": True}, "fp16": {**FP16, "enabled": False}})
    assert bf16.arguments["policy"] == zf.policy(compute="bf16")
    assert "loss_scale" not in bf16.arguments
    assert bf16.read["fp16.hysteresis"] == "off"
    with pytest.raises(ValueError, match="both enabled"):
        zf.from_deepspeed({"bf16": {"enabled": True}, "fp16": FP16})


def test_a_step_in_float16_runs() -> None:
    config = {**ZERO2, "fp16": FP16}
    init, step = zf.from_deepspeed(config, ranks=2).train_step(loss_fn, zf.Mesh(dp=2))
    _, metrics = step(init({k: x.float() for k, x in new_params().items()}), batches(1)[0])
    assert metrics["loss_scale"] == 256
    assert metrics["loss"].isfinite()


@pytest.mark.parametrize("kind", ["OneBitAdam", "ZeroOneAdam", "OneBitLamb"])
def test_optimizers_that_send_one_bit(kind: str) -> None:
    params: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01, "comm_backend_name": "nccl"}
    params |= {"var_freeze_step": 2} if kind == "ZeroOneAdam" else {"freeze_step": 2}
    read = zf.from_deepspeed({"optimizer": {"type": kind, "params": params}}, ranks=2)
    assert "optimizer.params.comm_backend_name" in read.unsupported
    init, step = read.train_step(loss_fn, zf.Mesh(dp=2))
    state = init({k: x.float() for k, x in new_params().items()})
    losses = []
    for x, y in batches(4):
        state, metrics = step(state, (x.float(), y.float()))
        losses.append(metrics["loss"].item())
    assert losses[-1] < losses[0] * 2


def test_stage_3_on_disk(tmp_path: Path) -> None:
    config = copy.deepcopy(ZERO2)
    config["zero_optimization"] = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path), "buffer_count": 4},
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)},
        "stage3_max_live_parameters": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    }
    read = zf.from_deepspeed(config, ranks=2)
    init, step = read.train_step(loss_fn, zf.Mesh(dp=2))
    state = init(new_params())
    for part in (state.opt_state, state.params):
        assert any(str(tmp_path) in place for place in zf.residency(part))
    assert read.arguments["stage"] == 3
    state, metrics = step(state, batches(1)[0])
    assert metrics["loss"].item() == pytest.approx(loss_fn(new_params(), batches(1)[0]).item())
    assert read.places == dict.fromkeys(("params.*", "opt_state.*"), tmp_path / "zero_fn")
    assert "zero_optimization.stage3_max_live_parameters" in read.unsupported


def test_where_parts_of_the_state_live(tmp_path: Path) -> None:
    nvme, cpu = {"device": "nvme", "nvme_path": str(tmp_path)}, {"device": "cpu"}

    def read(optimizer: Any, param: Any) -> Any:
        sections = {"offload_optimizer": optimizer, "offload_param": param}
        return zf.from_deepspeed({**ZERO2, "zero_optimization": {"stage": 3, **sections}}, ranks=2)

    here = tmp_path / "zero_fn"
    assert read(cpu, cpu).places == {"params.*": "cpu", "opt_state.*": "cpu"}
    assert read(nvme, cpu).places == {"params.*": "cpu", "opt_state.*": here}
    assert read({**nvme, "ratio": 0.5}, {}).fraction == 0.5
    assert read(cpu, {}).places == {"opt_state.*": "cpu"}
    assert read({}, cpu).places == {"params.*": "cpu"}
    both = read({**nvme, "ratio": 0.5}, nvme)
    assert "zero_optimization.offload_optimizer.ratio" in both.unsupported
    with pytest.raises(ValueError, match="give both the same"):
        read(nvme, {**nvme, "nvme_path": str(tmp_path / "other")})
    init, step = read(nvme, cpu).train_step(loss_fn, zf.Mesh(dp=2))
    state = init(new_params())
    assert list(zf.residency(state.params)) == ["cpu"]
    assert str(here) in zf.residency(state.opt_state)
    _, metrics = step(state, batches(1)[0])
    assert metrics["loss"].item() == pytest.approx(loss_fn(new_params(), batches(1)[0]).item())
    old = {**ZERO2, "zero_optimization": {"stage": 2, "cpu_offload": True}}
    assert zf.from_deepspeed(old).places == {"opt_state.*": "cpu"}


def test_sparse_attention_pipeline_and_logs(tmp_path: Path) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": 3,
                "sparse_attention": {
                    "mode": "fixed",
                    "block": 16,
                    "num_local_blocks": 8,
                    "attention": "unidirectional",
                },
                "pipeline": {"stages": 2, "activation_checkpoint_interval": 1},
                "tensor_parallel": {"autotp_size": 2},
                "csv_monitor": {
                    "enabled": True, "output_path": str(tmp_path), "job_name": "run",
                },
                "tensorboard": {"enabled": False, "output_path": "x"},
                "activation_checkpointing": {"partition_activations": True},
            }
        )
    )  # fmt: skip
    read = zf.from_deepspeed(path, ranks=8)
    assert read.axes == {"pp": 2, "dp": 2, "tp": 2}
    assert read.batch == 12
    assert read.layout is not None
    expected = Layout.fixed(256, 4, block=16, num_local_blocks=8, attention="unidirectional")
    assert read.layout(256, 4) == expected
    assert read.log is not None
    read.log()({"step": 1.0})
    assert (tmp_path / "run.csv").exists()
    assert "zf.remat" in read.unsupported["activation_checkpointing.partition_activations"]
    with pytest.raises(ValueError, match="no optimizer that is known"):
        read.train_step(loss_fn, zf.Mesh(dp=2))


def test_auto_needs_values() -> None:
    config = copy.deepcopy(ZERO2)
    config["optimizer"]["params"]["lr"] = "auto"
    config["gradient_clipping"] = "auto"
    with pytest.raises(ValueError, match=r"these are 'auto'.*gradient_clipping"):
        zf.from_deepspeed(config, ranks=4)
    auto = {"optimizer.params.lr": 1e-3, "gradient_clipping": 0.5}
    assert zf.from_deepspeed(config, ranks=4, auto=auto).arguments["clip"] == 0.5


def test_what_has_no_counterpart_is_told() -> None:
    config = {
        "optimizer": {"type": "Lamb", "params": {"lr": 1e-3, "max_coeff": 0.3}},
        "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4}},
    }
    read = zf.from_deepspeed(config)
    assert read.optimizer is None
    assert {"optimizer.type", "optimizer.params.max_coeff", "scheduler.type"} <= {*read.unsupported}
    config = {"optimizer": {"type": "Adam", "params": {"amsgrad": True}}}
    assert "it is False here" in zf.from_deepspeed(config).unsupported["optimizer.params.amsgrad"]
    config["scheduler"] = {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4}}
    assert "no OneCycle here" in zf.from_deepspeed(config).unsupported["scheduler.type"]


def test_sizes_that_do_not_agree() -> None:
    with pytest.raises(ValueError, match="train_batch_size is 16, not divisible by 3"):
        zf.from_deepspeed(ZERO2, ranks=3)
    sizes = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    assert zf.from_deepspeed(sizes, ranks=2).arguments["microbatches"] == 2
    with pytest.raises(ValueError, match="are 12"):
        zf.from_deepspeed({**sizes, "gradient_accumulation_steps": 3}, ranks=1)
    with pytest.raises(ValueError, match="did you mean 'bigbird'"):
        zf.from_deepspeed({"sparse_attention": {"mode": "bigbrid"}})
    with pytest.raises(ValueError, match="no nvme_path"):
        zf.from_deepspeed({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}})


def test_sgd_decays_as_torch_s() -> None:
    settings = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    config = {"optimizer": {"type": "SGD", "params": settings}, "gradient_clipping": 100}
    init, step = zf.from_deepspeed(config, ranks=2).train_step(loss_fn, zf.Mesh(dp=2))
    state, losses = init(new_params()), []
    for batch in batches(4):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"].item())

    def sgd(params: Any) -> Any:
        return torch.optim.SGD(params, **settings)

    expected = dense_losses(sgd, lambda _: 0.05, 100.0, 4)
    assert losses == pytest.approx(expected, rel=1e-9)  # float64, sums in other orders
