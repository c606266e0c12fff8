"""The keys of a configuration by their dotted names, and what became of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..naming import suggestion
from .reasons import OFFLOAD_KEYS, REASONS, SECTIONS, ZERO, ZERO_KEYS, reason_of

Config = Mapping[str, Any]


class Keys:
    """The keys of a configuration by their dotted names, and what became of each."""

    def __init__(self, config: Config, auto: Config) -> None:
        flat = dict(_flattened(config))
        self.left = {key: value for key, value in flat.items() if value != {}}
        self.auto, self.missing = auto, list[str]()
        self.read = dict.fromkeys(flat.keys() - self.left.keys(), "empty")
        self.reasons: dict[str, str] = {}

    def take(self, key: str, default: Any) -> Any:
        """The value of a key, which counts as read."""
        if key not in self.left:
            return default
        value = self.left.pop(key)
        if value == "auto":
            if key not in self.auto:
                self.missing.append(key)
                return default
            value = self.auto[key]
        self.read[key] = f"{value}"
        return value

    def became(self, key: str, words: str) -> None:
        if key in self.read:
            self.read[key] = words

    def not_here(self, key: str, reason: str) -> None:
        """A key that was read, and has no counterpart after all."""
        self.read.pop(key, None)
        self.reasons[key] = reason

    def section(self, name: str) -> dict[str, Any]:
        """The keys of a section that are not read yet, without its name; none count as read."""
        return {
            key.removeprefix(name + "."): value
            for key, value in self.left.items()
            if key.startswith(name + ".")
        }

    def is_on(self, section: str) -> bool:
        """Whether a section is enabled; the keys of one that is not count as read."""
        here = self.section(section)
        on = self.take(f"{section}.enabled", False) if "enabled" in here else False
        if not on:
            for key in here:
                self.left.pop(f"{section}.{key}", None)
                self.read[f"{section}.{key}"] = "off"
        return bool(on)

    def rest(self) -> dict[str, str]:
        """What has no counterpart, and why.

        Raises:
            ValueError: for what nobody knows, and for "auto" without a value.
        """
        unknown = []
        for key in self.left:
            name: str = key
            reason = reason_of(name)
            while reason is None and "." in name:
                name = name.rpartition(".")[0]
                reason = REASONS.get(name)
            if reason is None:
                unknown.append(key)
            else:
                self.reasons[key] = reason
        told = []
        for key in unknown:
            section, _, name = key.rpartition(".")
            told.append(f"unknown key {key!r}; {suggestion(name, _known(section))}")
        if self.missing:
            told.append(
                f"these are 'auto', and need values: {', '.join(self.missing)}; "
                f"from_deepspeed(config, auto={{{self.missing[0]!r}: ...}})"
            )
        if told:
            raise ValueError("\n".join(told))
        return self.reasons


def _flattened(config: Config, prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            found += _flattened(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


_READ = {
    "": (
        "train_batch_size",
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "optimizer", "scheduler", "fp16", "bf16", "zero_optimization", "sparse_attention",
        "pipeline", "tensor_parallel", "tensorboard", "csv_monitor", "communication_data_type",
    ),
    "zero_optimization": ("stage", "offload_optimizer", "offload_param", *ZERO_KEYS, *ZERO),
    "fp16": (
        "enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis",
        "consecutive_hysteresis", "min_loss_scale",
    ),
    "bf16": ("enabled",),
}  # fmt: skip


def _known(section: str) -> list[str]:
    start = f"{section}." if section else ""
    reasons = [key.removeprefix(start) for key in REASONS if key.startswith(start)]
    names = [*_READ.get(section, ()), *(name for name in reasons if "." not in name)]
    if section in SECTIONS and section != "zero_optimization":
        names += ["device", "nvme_path", "ratio", *OFFLOAD_KEYS]
    return names or ["type", "params"]
