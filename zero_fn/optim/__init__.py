"""Optimizers as ``(init, update)`` pairs: the protocol, what to chain, and the named ones."""

from .adam import AdamState, adam, adamw, scale_by_adam
from .compressing import CompressedState, compressed
from .delaying import DelayedState, delayed_update
from .groups import by_path
from .local import LocalOptimizer
from .onebit import OneBitState, onebit_adam, onebit_lamb
from .protocol import (
    Optimizer,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    clip_factor,
    global_norm,
    scale_by_factor,
    scale_by_learning_rate,
)
from .schedules import (
    constant,
    warmup_cosine,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_linear,
    warmup_lr,
)
from .sgd import SGDState, sgd
from .zero_one import ZeroOneState, zero_one_adam

__all__ = [
    "AdamState",
    "CompressedState",
    "DelayedState",
    "LocalOptimizer",
    "OneBitState",
    "Optimizer",
    "SGDState",
    "ZeroOneState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "by_path",
    "chain",
    "clip_by_global_norm",
    "clip_factor",
    "compressed",
    "constant",
    "delayed_update",
    "global_norm",
    "onebit_adam",
    "onebit_lamb",
    "scale_by_adam",
    "scale_by_factor",
    "scale_by_learning_rate",
    "sgd",
    "warmup_cosine",
    "warmup_cosine_lr",
    "warmup_decay_lr",
    "warmup_linear",
    "warmup_lr",
    "zero_one_adam",
]
