"""DeepSpeed's keys that have no counterpart, each with the reason.

A key that is neither here nor read is unknown, and an error.
"""

_FUSED = "gathers and reductions are placed, joined and overlapped by zf.jit, by sizes of its own"
_LOOP = "belongs to the training loop, which is yours (zf.fit is a short one)"
_LAUNCH = "belongs to a launcher or an engine, and there is none"
_PLAN = "zf.plan(step, state, batch) and program.flops() say it of any step"
_REMAT = "zf.remat wraps the functions that are computed again, in the loss"
_DATA = "belongs to the data, which are any iterable"

REASONS: dict[str, str] = {
    # the step
    "managed_gradient_accumulation": "a step takes the whole batch and cuts it by itself",
    "prescale_gradients": "gradients are means in float32, which does not overflow",
    "gradient_predivide_factor": "gradients are means in float32, which does not overflow",
    "gradient_allreduce_op": "gradients are those of the mean loss; scale the loss for a sum",
    "sparse_gradients": "gradients of embeddings are dense",
    "disable_allgather": _FUSED,
    "fp32_allreduce": "gradients travel in float32 by default",
    "seq_parallel_communication_data_type": "activations travel in the dtype they are computed in",
    "zero_allow_untested_optimizer": "any (init, update) pair works over pieces",
    "zero_force_ds_cpu_optimizer": "the update runs where its state lives",
    "data_types": "gradients add up in the dtype of the pieces, float32",
    "amp": "zf.policy(compute=...) is the one way to compute in low precision",
    "torch_autocast": "zf.policy(compute=...) is the one way to compute in low precision",
    "graph_harvesting": "a traced step is one graph; CUDA graphs are the compiler's business",
    "compile": "zf.train_step(..., compiler='inductor')",
    "zenflow": "an update is whole, and exact",
    # what it prints and writes
    "steps_per_print": _LOOP,
    "wall_clock_breakdown": "zf.fit(..., log=...) has the seconds of each step",
    "memory_breakdown": "program.memory_timeline() has it, by what the bytes are",
    "dump_state": "program, state and plans print themselves",
    "flops_profiler": _PLAN,
    "comms_logger": "program.collectives() has kind, axis, calls and bytes",
    "monitor_config": "zf.fit(..., log=f) calls any function",
    "wandb": "zf.fit(..., log=f) calls any function; wandb.log is one",
    "comet": "zf.fit(..., log=f) calls any function",
    "log_level": "logging.getLogger('zero_fn') is a plain logger",
    # elsewhere
    "autotuning": "`zero-fn plan --fit` looks for what fits and is fastest, before anything runs",
    "activation_checkpointing": _REMAT,
    "checkpoint": "zf.save and zf.load take any mesh and stage",
    "load_universal_checkpoint": "zf.load takes what any mesh and stage wrote",
    "use_data_before_expert_parallelism": "there are no experts",
    "elasticity": _LAUNCH,
    "disable_python_gc": _LAUNCH,
    "hybrid_engine": "zf.generate takes the parameters of any mesh",
    "compression_training": "zf.quantize, for inference; there is no pruning",
    "quantize_training": "zf.quantize, for inference",
    "data_efficiency": _DATA,
    "curriculum_learning": _DATA,
    "progressive_layer_drop": "a matter of the loss",
    "eigenvalue": "zf.grad twice is a Hessian-vector product",
    "dataloader_drop_last": _DATA,
    "aio": "files are mapped into memory",
    "nebula": "zf.save writes one folder, and renames it when it is complete",
    "weight_quantization": "zf.quantize, for inference",
    "data_parallel_group": _LAUNCH,
    "vocabulary_size": _DATA,
    # of sections that are read
    "fp16.auto_cast": "batches are cast as the policy says",
    "fp16.fp16_master_weights_and_grads": "masters are float32; zf.policy(params=...) is by hand",
    "bf16.immediate_grad_update": "gradients are added up as each stage's scheme says",
    "bf16.check_grad_overflow": "zf.train_step(..., check_finite=True) stops there",
    "bf16.bf16_master_weights_and_grads": "masters are float32; zf.policy(params=...) is by hand",
    "bf16.bf16_optimizer_states": "moments are float32; zf.policy(params=...) is by hand",
    "optimizer.legacy_fusion": _FUSED,
    "optimizer.params.torch_adam": "one Adam, torch's fused one on a CPU",
    "optimizer.params.cuda_aware": "the mesh's backend sends",
    "optimizer.params.comm_backend_name": "the mesh's backend sends",
    "optimizer.params.max_grad_norm": "a norm is clipped by gradient_clipping",
    "optimizer.params.fused": "the update is fused where it can be",
    "optimizer.params.foreach": "the update is fused where it can be",
    "pipeline.partition": "stages are a list of functions; zf.partition cuts layers by their costs",
    "pipeline.seed_layers": "stages are functions of parameters that are made before",
    "pipeline.activation_checkpoint_interval": _REMAT,
    "pipeline.pipe_partitioned": "carries travel as they are",
    "pipeline.grad_partitioned": "carries travel as they are",
}

# Sections whose every key has one reason.
SECTIONS: dict[str, str] = {
    "zero_optimization": _FUSED,
    "zero_optimization.offload_optimizer": "leaves move whole, through two chunks of 16 MiB",
    "zero_optimization.offload_param": "leaves move whole, and are read ahead by one use",
}
# Keys of the first, which are more than a number there.
ZERO: dict[str, str] = {
    "zero_hpz_partition_size": "a scheme of your own: zf.shard(params, MyScheme())",
    "zero_quantized_weights": "a scheme of your own whose gather rounds",
    "zero_quantized_nontrainable_weights": "zf.quantize(zf.freeze(...)) keeps them rounded",
    "zero_quantized_gradients": "compress='int8', at stages 0 and 1",
    "elastic_checkpoint": "zf.load takes any number of ranks",
    "load_from_fp32_weights": "masters are float32, and saved",
    "gather_16bit_weights_on_model_save": "zf.gather_tree(params, mesh) gathers them",
    "ignore_unused_parameters": "a parameter that nothing uses has a gradient of zeros",
    "round_robin_gradients": _FUSED,
    "mics_shard_size": "a scheme of your own over one of two data axes",
    "mics_hierarchical_params_gather": "a scheme of your own over one of two data axes",
    "memory_efficient_linear": "the traced step keeps what its backward reads",
}
ZERO_KEYS = (
    "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "allgather_partitions",
    "use_multi_rank_bucket_allreduce", "allgather_bucket_size", "overlap_comm", "sub_group_size",
    "compute_grad_norm", "zenflow", "cpu_offload_param", "cpu_offload_use_pin_memory",
    "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold",
    "max_live_parameters", "max_reuse_distance", "module_granularity_threshold",
    "use_all_reduce_for_fetch_params", "allgather_sequential", "parameter_alignment",
    "pipeline_loading_checkpoint", "override_module_apply", "log_trace_cache_warnings",
    "enable_sanity_checks", "save_muon_momentum_buffer_in_memory", "leaf_module",
    "legacy_stage1",
)  # fmt: skip
OFFLOAD_KEYS = (
    "pin_memory", "buffer_count", "buffer_size", "max_in_cpu", "pipeline_read", "pipeline_write",
    "pipeline", "fast_init", "super_offload", "cpuadam_cores_perc",
)  # fmt: skip


def reason_of(key: str) -> str | None:
    """Why a key has no counterpart; None for a key that nobody knows."""
    section, _, name = key.rpartition(".")
    name = name.removeprefix("stage3_")
    if key in REASONS:
        return REASONS[key]
    if section == "zero_optimization":
        return ZERO.get(name, SECTIONS[section] if name in ZERO_KEYS else None)
    if section in SECTIONS:
        return SECTIONS[section] if name in OFFLOAD_KEYS else None
    return None
