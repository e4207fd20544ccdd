//! Keys of activation checkpointing, checkpoints, monitors and DeepSpeed's other features.

use super::{Key, Kind};

pub(super) const KEYS: &[Key] = &[
    Key::new("activation_checkpointing.partition_activations", Kind::Bool, "false")
        .idle("divides activations among tensor-parallel ranks, of which there are none"),
    Key::new("activation_checkpointing.cpu_checkpointing", Kind::Bool, "false")
        .runs("activations of checkpointed blocks are kept in host memory"),
    Key::new("activation_checkpointing.contiguous_memory_optimization", Kind::Bool, "false")
        .idle("the allocator reuses blocks of equal size"),
    Key::new("activation_checkpointing.number_checkpoints", Kind::Whole, "")
        .runs("how many parts are checkpointed"),
    Key::new("activation_checkpointing.synchronize_checkpoint_boundary", Kind::Bool, "false")
        .idle("waits for the GPU, for measurements only"),
    Key::new("activation_checkpointing.profile", Kind::Bool, "false")
        .idle("`TRAIN.TRACE_STEPS` shows each block"),
    Key::new(
        "checkpoint.tag_validation",
        Kind::Choice(&["Warn", "Ignore", "Fail", "WARN", "IGNORE", "FAIL"]),
        "Warn",
    )
    .runs("what happens if ranks save under different tags"),
    Key::new("checkpoint.load_universal", Kind::Bool, "false")
        .idle("always: any number of ranks and any stage resumes from a checkpoint"),
    Key::new("checkpoint.use_node_local_storage", Kind::Bool, "false")
        .refused("a checkpoint is one folder that all ranks see; try a shared folder"),
    Key::new("checkpoint.parallel_write.pipeline_stage", Kind::Bool, "false")
        .idle("each rank writes its own rows"),
    Key::new("checkpoint.writer", Kind::Any, "").idle("checkpoints are written beside the training"),
    Key::new("aio.block_size", Kind::Whole, "1048576")
        .idle("files are read and written in sizes that suit the disk"),
    Key::new("aio.queue_depth", Kind::Whole, "8").idle("threads with direct I/O have no queue"),
    Key::new("aio.thread_count", Kind::Whole, "1").idle("the cores of a rank decide"),
    Key::new("aio.intra_op_parallelism", Kind::Whole, "1").idle("the cores of a rank decide"),
    Key::new("aio.single_submit", Kind::Bool, "false").idle("threads with direct I/O have no queue"),
    Key::new("aio.overlap_events", Kind::Bool, "true").idle("threads with direct I/O have no queue"),
    Key::new("aio.use_gds", Kind::Bool, "false").idle("files are read through host memory"),
    Key::new("tensorboard.enabled", Kind::Bool, "false")
        .runs("event files; in `drumline train` `TRAIN.TENSORBOARD`"),
    Key::new("tensorboard.output_path", Kind::Text, "")
        .runs("their folder; `drumline train` has them in OUT_DIR/tensorboard"),
    Key::new("tensorboard.job_name", Kind::Text, "DeepSpeedJobName")
        .runs("the folder within; in `drumline train` the name of OUT_DIR"),
    Key::new("csv_monitor.enabled", Kind::Bool, "false")
        .runs("a CSV file for each figure; in `drumline train` `TRAIN.CSV`"),
    Key::new("csv_monitor.output_path", Kind::Text, "").runs("their folder; by default the current one"),
    Key::new("csv_monitor.job_name", Kind::Text, "DeepSpeedJobName").runs("the folder within"),
    Key::new("wandb.enabled", Kind::Bool, "false").refused(
        "nothing is sent to a service; try tensorboard, whose files `wandb sync` uploads, or csv_monitor",
    ),
    Key::new("wandb.group", Kind::Text, "").idle("is for wandb, which is refused if it is enabled"),
    Key::new("wandb.team", Kind::Text, "").idle("is for wandb"),
    Key::new("wandb.project", Kind::Text, "deepspeed").idle("is for wandb"),
    Key::new("comet", Kind::Block, "")
        .refused("nothing is sent to a service; try tensorboard or csv_monitor"),
    Key::new("comms_logger", Kind::Block, "")
        .idle("`TRAIN.TRACE_STEPS` records every collective with its bytes and time"),
    Key::new("flops_profiler", Kind::Block, "")
        .idle("`TRAIN.TRACE_STEPS` records where the time of a step goes"),
    Key::new("pipeline.stages", Kind::Any, "auto")
        .idle("is for models that are pipelines, of which there are none"),
    Key::new("pipeline.partition", Kind::Text, "best").idle("is for models that are pipelines"),
    Key::new("pipeline.seed_layers", Kind::Bool, "false").idle("is for models that are pipelines"),
    Key::new("pipeline.activation_checkpoint_interval", Kind::Whole, "0")
        .idle("is for models that are pipelines"),
    Key::new("pipeline.pipe_partitioned", Kind::Bool, "true").idle("is for models that are pipelines"),
    Key::new("pipeline.grad_partitioned", Kind::Bool, "true").idle("is for models that are pipelines"),
    Key::new("pipeline.use_reentrant", Kind::Bool, "true").idle("is for models that are pipelines"),
    Key::new("tensor_parallel.autotp_size", Kind::Whole, "0")
        .refused("is not read from here; try PARALLEL.TP"),
    Key::new("tensor_parallel.tp_grain_size", Kind::Whole, "1").idle("is for autotp_size"),
    Key::new("compile.deepcompile", Kind::Bool, "false")
        .idle("steps on a GPU are recorded as CUDA graphs by themselves"),
    Key::new("compile.enabled", Kind::Bool, "false")
        .idle("steps on a GPU are recorded as CUDA graphs by themselves"),
    Key::new("compile.backend", Kind::Text, "").idle("there is no compiler to choose"),
    Key::new("compile.kwargs", Kind::Block, "").idle("there is no compiler to choose"),
    Key::new("graph_harvesting", Kind::Bool, "false")
        .idle("steps on a GPU are recorded as CUDA graphs by themselves"),
    Key::new("use_data_before_expert_parallelism", Kind::Bool, "false").idle("there are no experts"),
    Key::new("elasticity", Kind::Block, "").refused(
        "the batch does not follow from the ranks; try `drumline run --nnodes MIN:MAX` and fixed batch sizes",
    ),
    Key::new("autotuning", Kind::Block, "").refused("nothing is searched; try the values that it has found"),
    Key::new("compression_training", Kind::Block, "")
        .refused("weights are not pruned or quantized; try without it"),
    Key::new("quantize_training", Kind::Block, "").refused("weights are not quantized; try without it"),
    Key::new("weight_quantization", Kind::Any, "").refused("weights are not quantized; try without it"),
    Key::new("data_efficiency", Kind::Block, "").refused("samples are not routed or sampled; try without it"),
    Key::new("curriculum_learning", Kind::Block, "")
        .refused("lengths do not grow; try a sampler of your own"),
    Key::new("progressive_layer_drop", Kind::Block, "").refused("layers are not dropped; try without it"),
    Key::new("eigenvalue", Kind::Block, "").refused("is for quantization; try without it"),
    Key::new("hybrid_engine", Kind::Block, "").refused("is for generation during training; try without it"),
    Key::new("sparse_attention", Kind::Any, "").refused("attention is dense; try without it"),
    Key::new("nebula", Kind::Block, "").refused("is a service of Azure; try without it"),
    Key::new("datastates_ckpt", Kind::Block, "").idle("checkpoints are written beside the training"),
];
