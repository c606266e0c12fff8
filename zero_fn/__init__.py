"""What DeepSpeed does, as pure functions over ``torch.func``.

Write the train step once, as a pure function; transform its data, and the step follows.
"""

# Where ranks are, and running one rank's program on all of them.
from .mesh import Mesh
from .ranks import spmd

# Collectives between the ranks of a mesh axis, differentiable.
from .collectives import (
    all_gather,
    all_gather_invariant,
    all_to_all,
    axis_index,
    axis_size,
    pmean,
    ppermute,
    pscatter,
    psum,
    psum_scatter,
    pvary,
)

# Derivatives, recomputation in place of memory, and gradients added up over micro-batches.
from .accumulation import accumulate
from .autodiff import grad, grad_and_value, remat

# ZeRO: cutting a tree over ranks, and putting it together.
from .sharding import Scheme, Sharded, gather_tree, shard, unshard

# Tensor slicing: computing with slices of the weights, after Megatron.
from .sliced_layers import column_linear, row_linear, vocab_cross_entropy, vocab_embedding
from .slicing import Sliced, SliceRule, local_slices, slice_params

# Compressed communication: means of gradients in few bytes, with error feedback.
from .codecs import BFloat16, Codec, Int8, OneBit, PowerSGD, TopK
from .compression import compress, compression_state
from .feedback import ErrorFeedback

# Pipelines: stages run by a schedule. Schedules as data: build, check, time and draw them; cut
# layers into stages.
from .pipelining.builders import pipeline_schedule
from .pipelining.checking import check_schedule
from .pipelining.partition import partition
from .pipelining.run import pipeline
from .pipelining.timeline import timeline

# Optimizers, as (init, update) pairs.
from .optim import (
    LocalOptimizer,
    Optimizer,
    adam,
    adamw,
    add_decayed_weights,
    apply_updates,
    chain,
    clip_by_global_norm,
    compressed,
    constant,
    global_norm,
    onebit_adam,
    onebit_lamb,
    scale_by_adam,
    scale_by_learning_rate,
    sgd,
    warmup_cosine,
    warmup_cosine_lr,
    warmup_decay_lr,
    warmup_linear,
    warmup_lr,
    zero_one_adam,
)

# The dtypes of a step, loss scales as state, and steps that are skipped where gradients overflow.
from .precision import LossScale, Policy, all_finite, policy, select

# Where state lives: on the host, on disk.
from .offloading import Residency, discard, offload, residency, restore

# Tracing a step into one graph.
from .compiler import jit
from .program import Program

# A ready-made step and loop.
from .train import Train, TrainState, fit, progress, train_step

# Pytrees of one's own, and checks for schemes of one's own.
from . import testing
from .tree import register_dataclass

__all__ = [
    "BFloat16",
    "Codec",
    "ErrorFeedback",
    "Int8",
    "LocalOptimizer",
    "LossScale",
    "Mesh",
    "OneBit",
    "Optimizer",
    "Policy",
    "PowerSGD",
    "Program",
    "Residency",
    "Scheme",
    "Sharded",
    "SliceRule",
    "Sliced",
    "TopK",
    "Train",
    "TrainState",
    "accumulate",
    "adam",
    "adamw",
    "add_decayed_weights",
    "all_finite",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "apply_updates",
    "axis_index",
    "axis_size",
    "chain",
    "check_schedule",
    "clip_by_global_norm",
    "column_linear",
    "compress",
    "compressed",
    "compression_state",
    "constant",
    "discard",
    "fit",
    "gather_tree",
    "global_norm",
    "grad",
    "grad_and_value",
    "jit",
    "local_slices",
    "offload",
    "onebit_adam",
    "onebit_lamb",
    "partition",
    "pipeline",
    "pipeline_schedule",
    "pmean",
    "policy",
    "ppermute",
    "progress",
    "pscatter",
    "psum",
    "psum_scatter",
    "pvary",
    "register_dataclass",
    "remat",
    "residency",
    "restore",
    "row_linear",
    "scale_by_adam",
    "scale_by_learning_rate",
    "select",
    "sgd",
    "shard",
    "slice_params",
    "spmd",
    "testing",
    "timeline",
    "train_step",
    "unshard",
    "vocab_cross_entropy",
    "vocab_embedding",
    "warmup_cosine",
    "warmup_cosine_lr",
    "warmup_decay_lr",
    "warmup_linear",
    "warmup_lr",
    "zero_one_adam",
]
