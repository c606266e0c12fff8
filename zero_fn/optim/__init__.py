"""Optimizers as ``(init, update)`` pairs: the protocol, what to chain, and the named ones."""

from .adam import AdamState, adam, adamw, scale_by_adam
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
from .schedules import constant, warmup_cosine, warmup_linear
from .sgd import SGDState, sgd

__all__ = [
    "AdamState",
    "Optimizer",
    "SGDState",
    "adam",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "chain",
    "clip_by_global_norm",
    "clip_factor",
    "constant",
    "global_norm",
    "scale_by_adam",
    "scale_by_factor",
    "scale_by_learning_rate",
    "sgd",
    "warmup_cosine",
    "warmup_linear",
]
