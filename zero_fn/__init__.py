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
from .activations import activation_offload
from .marks import checkpoint_name

# ZeRO: cutting a tree over ranks, and putting it together.
from .sharding import Scheme, Sharded, gather_tree, shard, tied, unshard

# Tensor slicing: computing with slices of the weights, after Megatron.
from .sliced_layers import column_linear, row_linear, vocab_cross_entropy, vocab_embedding
from .slicing import Sliced, SliceRule, local_slices, slice_params

# Leaves that are not trained.
from .freezing import freeze, merge

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
    by_path,
    delayed_update,
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

# Random numbers as functions of a key: dropout that is the same wherever it is computed.
from . import random

# torch.nn modules as parameters and a function of them.
from .modules import from_module, to_module

# Checkpoints: a state of any mesh and stage, read on any other.
from .background import Saving
from .checkpoint import load, save, save_async, saved_steps
from .safetensors_files import export_safetensors, import_safetensors

# Tracing a step into one graph.
from .compiler import jit
from .program import Program

# What a step will cost, before it runs.
from .hardware import Hardware, hardware
from .planning import Plan, compare, eval_shape, plan

# Which rank holds what.
from .sharding_pictures import ShardingPicture, show_sharding

# A ready-made step and loop, and logs of it.
from .logs import csv_log, tensorboard_log
from .fitting import fit, progress
from .resuming import Checkpoints
from .states import Train, TrainState, unfreeze
from .train import train_step

# Processes, started from a notebook or a script.
from .launching import RankError, launch

# Configurations of DeepSpeed's, read into steps.
from .deepspeed.config import FromDeepSpeed, from_deepspeed

# Inference: generation, batching, quantised weights, and students of larger models.
from .inference.batching import Batcher
from .inference.continuous import ContinuousBatcher
from .inference.distillation import distillation_loss
from .inference.generation import generate
from .inference.products import linear
from .inference.quantization import Quantized, dequantize, quantize
from .inference.quantization_errors import quantization_error


# Pytrees of one's own, and checks for schemes of one's own.
from . import testing
from .tree import register_dataclass

__all__ = [
    "BFloat16",
    "Batcher",
    "Checkpoints",
    "Codec",
    "ContinuousBatcher",
    "ErrorFeedback",
    "FromDeepSpeed",
    "Hardware",
    "Int8",
    "LocalOptimizer",
    "LossScale",
    "Mesh",
    "OneBit",
    "Optimizer",
    "Plan",
    "Policy",
    "PowerSGD",
    "Program",
    "Quantized",
    "RankError",
    "Residency",
    "Saving",
    "Scheme",
    "Sharded",
    "ShardingPicture",
    "SliceRule",
    "Sliced",
    "TopK",
    "Train",
    "TrainState",
    "accumulate",
    "activation_offload",
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
    "by_path",
    "chain",
    "check_schedule",
    "checkpoint_name",
    "clip_by_global_norm",
    "column_linear",
    "compare",
    "compress",
    "compressed",
    "compression_state",
    "constant",
    "csv_log",
    "delayed_update",
    "dequantize",
    "discard",
    "distillation_loss",
    "eval_shape",
    "export_safetensors",
    "fit",
    "freeze",
    "from_deepspeed",
    "from_module",
    "gather_tree",
    "generate",
    "global_norm",
    "grad",
    "grad_and_value",
    "hardware",
    "import_safetensors",
    "jit",
    "launch",
    "linear",
    "load",
    "local_slices",
    "merge",
    "offload",
    "onebit_adam",
    "onebit_lamb",
    "partition",
    "pipeline",
    "pipeline_schedule",
    "plan",
    "pmean",
    "policy",
    "ppermute",
    "progress",
    "pscatter",
    "psum",
    "psum_scatter",
    "pvary",
    "quantization_error",
    "quantize",
    "random",
    "register_dataclass",
    "remat",
    "residency",
    "restore",
    "row_linear",
    "save",
    "save_async",
    "saved_steps",
    "scale_by_adam",
    "scale_by_learning_rate",
    "select",
    "sgd",
    "shard",
    "show_sharding",
    "slice_params",
    "spmd",
    "tensorboard_log",
    "testing",
    "tied",
    "timeline",
    "to_module",
    "train_step",
    "unfreeze",
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
