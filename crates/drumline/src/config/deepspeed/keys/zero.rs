//! Keys of ZeRO and offload.

use super::{Key, Kind};

const DEVICES: Kind = Kind::Choice(&["none", "cpu", "nvme"]);

pub(super) const KEYS: &[Key] = &[
    Key::new("zero_optimization.stage", Kind::Choice(&["0", "1", "2", "3"]), "0")
        .runs("what ranks divide among them; in `drumline train` `PARALLEL.ZERO`"),
    Key::new("zero_optimization.contiguous_gradients", Kind::Bool, "true")
        .idle("always: gradients of a unit are in one buffer"),
    Key::new("zero_optimization.reduce_scatter", Kind::Bool, "true")
        .idle("always: a rank receives only its own rows"),
    Key::new("zero_optimization.reduce_bucket_size", Kind::Whole, "5e8")
        .auto("hidden size²")
        .idle("gradients are reduced unit by unit, so that no bucket is larger than a unit"),
    Key::new("zero_optimization.use_multi_rank_bucket_allreduce", Kind::Bool, "true")
        .idle("one reduction serves all ranks"),
    Key::new("zero_optimization.allgather_partitions", Kind::Bool, "true").idle("always: rows are gathered"),
    Key::new("zero_optimization.allgather_bucket_size", Kind::Whole, "5e8")
        .idle("rows are gathered unit by unit"),
    Key::new("zero_optimization.overlap_comm", Kind::Bool, "")
        .idle("always: reductions and gathers run beside backward"),
    Key::new("zero_optimization.load_from_fp32_weights", Kind::Bool, "true")
        .idle("checkpoints have the exact weights"),
    Key::new("zero_optimization.elastic_checkpoint", Kind::Bool, "false")
        .idle("always: any number of ranks and any stage resumes from a checkpoint"),
    Key::new("zero_optimization.sub_group_size", Kind::Whole, "1e9").idle("the optimizer steps unit by unit"),
    Key::new("zero_optimization.stage3_prefetch_bucket_size", Kind::Whole, "5e7")
        .auto("0.9 · hidden size²")
        .idle("the next unit is gathered ahead"),
    Key::new("zero_optimization.stage3_param_persistence_threshold", Kind::Whole, "1e5")
        .auto("10 · hidden size")
        .runs("stage 3: smaller parameters stay gathered (`ShardOptions::keep_gathered`)"),
    Key::new("zero_optimization.stage3_model_persistence_threshold", Kind::Whole, "")
        .idle("the threshold of single parameters decides"),
    Key::new("zero_optimization.stage3_max_live_parameters", Kind::Whole, "1e9")
        .idle("two units are gathered at a time"),
    Key::new("zero_optimization.stage3_max_reuse_distance", Kind::Whole, "1e9")
        .idle("two units are gathered at a time"),
    Key::new("zero_optimization.stage3_gather_16bit_weights_on_model_save", Kind::Bool, "false")
        .idle("always: `drumline export` writes whole weights from the shards"),
    Key::new("zero_optimization.stage3_module_granularity_threshold", Kind::Whole, "0")
        .idle("units are found by use"),
    Key::new("zero_optimization.stage3_use_all_reduce_for_fetch_params", Kind::Bool, "false")
        .idle("another collective with the same result"),
    Key::new("zero_optimization.stage3_allgather_sequential", Kind::Bool, "false")
        .idle("another order with the same result"),
    Key::new("zero_optimization.stage3_partition_stream_chunk_size", Kind::Whole, "0")
        .idle("another order with the same result"),
    Key::new("zero_optimization.ignore_unused_parameters", Kind::Bool, "true")
        .idle("a parameter without a gradient is not stepped"),
    Key::new("zero_optimization.legacy_stage1", Kind::Bool, "false").idle("there is one stage 1"),
    Key::new("zero_optimization.round_robin_gradients", Kind::Bool, "false")
        .idle("rows of every unit are spread over all ranks"),
    Key::new("zero_optimization.zero_hpz_partition_size", Kind::Whole, "1")
        .idle("saves traffic between nodes with the same result; for less traffic, mics_shard_size"),
    Key::new("zero_optimization.zero_quantized_weights", Kind::Bool, "false")
        .refused("weights are gathered exactly; try false"),
    Key::new("zero_optimization.zero_quantized_nontrainable_weights", Kind::Bool, "false")
        .refused("weights are gathered exactly; try false"),
    Key::new("zero_optimization.zero_quantized_gradients", Kind::Bool, "false")
        .refused("gradients are reduced exactly; try false, or stage 0 with communication_data_type"),
    Key::new("zero_optimization.zeropp_loco_param", Kind::Block, "")
        .idle("is for zero_quantized_gradients, which is refused"),
    Key::new("zero_optimization.mics_shard_size", Kind::Integer, "-1").runs(
        "stage 3: ranks that hold a copy of the model together (`ShardOptions::shard`, `PARALLEL.SHARD`)",
    ),
    Key::new("zero_optimization.mics_hierarchical_params_gather", Kind::Bool, "false")
        .idle("collectives are hierarchical by themselves"),
    Key::new("zero_optimization.memory_efficient_linear", Kind::Bool, "true")
        .idle("linear layers save no copies"),
    Key::new("zero_optimization.pipeline_loading_checkpoint", Kind::Bool, "false")
        .idle("each rank reads only its own rows"),
    Key::new("zero_optimization.override_module_apply", Kind::Bool, "true")
        .idle("models have no such method here"),
    Key::new("zero_optimization.log_trace_cache_warnings", Kind::Bool, "false")
        .idle("another order of units is gathered on demand"),
    Key::new("zero_optimization.enable_sanity_checks", Kind::Bool, "false")
        .idle("always: ranks compare every collective"),
    Key::new("zero_optimization.leaf_module", Kind::Block, "").idle("units are found by use, not by modules"),
    Key::new("zero_optimization.zenflow", Kind::Any, "")
        .refused("its late steps change the training; try offload_optimizer alone"),
    Key::new("zero_optimization.offload_optimizer.device", DEVICES, "none")
        .auto("none")
        .runs("where the optimizer's state is"),
    Key::new("zero_optimization.offload_optimizer.nvme_path", Kind::Text, "").runs("the folder of `nvme`"),
    Key::new("zero_optimization.offload_optimizer.buffer_count", Kind::Whole, "4")
        .idle("buffers follow from the units"),
    Key::new("zero_optimization.offload_optimizer.pin_memory", Kind::Bool, "false")
        .idle("always: host memory of GPUs is pinned"),
    Key::new("zero_optimization.offload_optimizer.pipeline_read", Kind::Bool, "false")
        .idle("always: reads run ahead"),
    Key::new("zero_optimization.offload_optimizer.pipeline_write", Kind::Bool, "false")
        .idle("always: writes run behind"),
    Key::new("zero_optimization.offload_optimizer.fast_init", Kind::Bool, "false")
        .idle("the state is created where it stays"),
    Key::new("zero_optimization.offload_optimizer.ratio", Kind::Number, "1.0")
        .runs("stage 3: the part of the parameters whose state is offloaded"),
    Key::new("zero_optimization.offload_optimizer.super_offload", Kind::Bool, "false")
        .idle("another order with the same result"),
    Key::new("zero_optimization.offload_optimizer.convert_grad_on_cpu", Kind::Bool, "true")
        .idle("another order with the same result"),
    Key::new("zero_optimization.offload_optimizer.cpuadam_cores_perc", Kind::Number, "0.8")
        .idle("a rank's steps use the cores on which it is placed"),
    Key::new("zero_optimization.offload_param.device", DEVICES, "none")
        .auto("none")
        .runs("stage 3: where parameters are"),
    Key::new("zero_optimization.offload_param.nvme_path", Kind::Text, "").runs("the folder of `nvme`"),
    Key::new("zero_optimization.offload_param.buffer_count", Kind::Whole, "5")
        .idle("buffers follow from the units"),
    Key::new("zero_optimization.offload_param.buffer_size", Kind::Whole, "1e8")
        .idle("buffers follow from the units"),
    Key::new("zero_optimization.offload_param.max_in_cpu", Kind::Whole, "1e9")
        .idle("what is offloaded to a disk is there as a whole"),
    Key::new("zero_optimization.offload_param.pin_memory", Kind::Bool, "false")
        .idle("always: host memory of GPUs is pinned"),
];
