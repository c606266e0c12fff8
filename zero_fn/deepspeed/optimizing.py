"""Optimizer, schedule and precision, from their sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..optim import (
    LocalOptimizer,
    Optimizer,
    adam,
    adamw,
    add_decayed_weights,
    chain,
    constant,
    onebit_adam,
    onebit_lamb,
    sgd,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_lr,
    zero_one_adam,
)
from ..precision import LossScale, policy
from .keys import Keys

_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "bfp16": "bfloat16", "fp32": "float32"}


def read_precision(keys: Keys) -> dict[str, Any]:
    found: dict[str, Any] = {}
    reduce = keys.take("communication_data_type", None)
    reduce = "float32" if reduce is None else _DTYPES.get(reduce, reduce)
    half = keys.is_on("fp16")
    bf16 = keys.is_on("bf16") or keys.is_on("bfloat16")
    if half and bf16:
        raise ValueError("fp16 and bf16 are both enabled; a step computes in one of them")
    if half or bf16:
        compute = "float16" if half else "bfloat16"
        found["policy"] = policy(compute=compute, reduce=reduce)
        words = f"policy=zf.policy(compute={compute!r}, reduce={reduce!r})"
        keys.became("fp16.enabled" if half else "bf16.enabled", words)
        keys.became("communication_data_type", f"reduce={reduce!r}")
    elif "communication_data_type" in keys.read:
        found["policy"] = policy(compute="float32", reduce=reduce)
    if half:
        static = keys.take("fp16.loss_scale", 0)
        power = keys.take("fp16.initial_scale_power", 16)
        window = keys.take("fp16.loss_scale_window", 1000)
        hysteresis = keys.take("fp16.hysteresis", 2)
        again = keys.take("fp16.consecutive_hysteresis", False)
        least = max(keys.take("fp16.min_loss_scale", 1), 2.0**-24)
        if static:
            scale = LossScale(initial=static, factor=1, minimum=min(static, least))
        else:
            scale = LossScale(2.0**power, 2.0, window, least, hysteresis, again)
        found["loss_scale"] = scale
        keys.became("fp16.loss_scale", f"loss_scale={scale}")
    return found


_OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "adam": adamw, "adamw": adamw, "sgd": sgd, "onebitadam": onebit_adam,
    "zerooneadam": zero_one_adam, "onebitlamb": onebit_lamb,
}  # fmt: skip
_RENAMED = {"betas": "", "lr": "learning_rate"}
_TAKEN: dict[str, tuple[str, ...]] = {
    "adam": ("eps", "weight_decay"),
    "adamw": ("eps", "weight_decay"),
    "sgd": ("momentum", "nesterov"),
    "onebitadam": ("eps", "weight_decay", "freeze_step"),
    "zerooneadam": (
        "eps", "weight_decay", "var_freeze_step", "var_update_scaler", "local_step_scaler",
        "local_step_clipper",
    ),
    "onebitlamb": ("eps", "weight_decay", "freeze_step", "coeff_beta", "factor_threshold"),
}  # fmt: skip


def read_optimizer(keys: Keys) -> Optimizer | LocalOptimizer | None:
    name = keys.take("optimizer.type", None)
    if name is None:
        return None
    kind = str(name).lower()
    params = "optimizer.params"
    if kind not in _OPTIMIZERS:
        keys.not_here("optimizer.type", f"no {name} here; any (init, update) pair is an optimizer")
        for key in keys.section(params):
            keys.left.pop(f"{params}.{key}")
            keys.not_here(f"{params}.{key}", f"of {name}, which has no counterpart")
        for key in keys.section("scheduler"):
            keys.left.pop(f"scheduler.{key}")
            keys.not_here(f"scheduler.{key}", f"a schedule is an argument of {name}'s counterpart")
        return None
    make = _OPTIMIZERS[kind]
    settings: dict[str, Any] = {}
    if kind != "sgd":
        settings["b1"], settings["b2"] = keys.take(f"{params}.betas", (0.9, 0.999))
        settings["weight_decay"] = 0.0
    for each in _TAKEN[kind]:
        value = keys.take(f"{params}.{each}", None)
        if value is not None:
            settings[each] = value
    if kind in ("adam", "adamw") and not keys.take(f"{params}.adam_w_mode", True):
        make = adam
    _check_fixed(keys, params)
    if kind == "onebitlamb":
        settings["coeff_range"] = tuple(
            keys.take(f"{params}.{end}_coeff", value)
            for end, value in (("min", 0.01), ("max", 10.0))
        )
        settings["factor_range"] = tuple(
            keys.take(f"{params}.factor_{end}", value)
            for end, value in (("min", 0.5), ("max", 4.0))
        )
    rate = keys.take(f"{params}.lr", 1e-3)
    keys.became("optimizer.type", f"zf.{make.__name__}")
    schedule = _schedule(keys, rate)
    made = make(rate if schedule is None else schedule, **settings)
    decay = keys.take(f"{params}.weight_decay", 0.0)  # of SGD: the others have taken it
    return chain(add_decayed_weights(decay), made) if decay else made


def _check_fixed(keys: Keys, params: str) -> None:
    """Settings that have one value here."""
    fixed = {"bias_correction": True, "amsgrad": False, "exp_avg_mask": None, "dampening": 0}
    for name, only in fixed.items():
        key = f"{params}.{name}"
        if key in keys.left and keys.take(key, only) != only:
            keys.not_here(key, f"it is {only} here")


_SCHEDULES: dict[str, Callable[..., Any]] = {
    "WarmupLR": warmup_lr,
    "WarmupDecayLR": warmup_decay_lr,
    "WarmupCosineLR": warmup_cosine_lr,
}


def _schedule(keys: Keys, rate: float) -> Any:
    name = keys.take("scheduler.type", None)
    if name is None:
        return None
    params = keys.section("scheduler.params")
    if name not in _SCHEDULES:
        reason = f"no {name} here; a schedule is any function of the step's count"
        keys.not_here("scheduler.type", reason)
        for key in params:
            keys.left.pop(f"scheduler.params.{key}")
            keys.not_here(f"scheduler.params.{key}", f"of {name}, which has no counterpart")
        return constant(rate)
    params.pop("last_batch_iteration", None)
    settings = {key: keys.take(f"scheduler.params.{key}", None) for key in params}
    settings = {key: value for key, value in settings.items() if value is not None}
    if name == "WarmupCosineLR":
        settings["learning_rate"] = rate
    elif "optimizer.params.lr" in keys.read:
        keys.became("optimizer.params.lr", f"{rate}, which {name} sets from the first step on")
    keys.became("scheduler.type", f"zf.{_SCHEDULES[name].__name__}")
    keys.left.pop("scheduler.params.last_batch_iteration", None)
    try:
        return _SCHEDULES[name](**settings)
    except TypeError as error:
        raise ValueError(f"scheduler.params of {name}: {error}") from error
