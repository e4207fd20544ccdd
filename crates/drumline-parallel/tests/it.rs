//! Data parallelism as real processes, against the same training in one process.
#![allow(clippy::unwrap_used)]

#[path = "it/averaging.rs"]
mod averaging;
#[path = "it/checkpointing.rs"]
mod checkpointing;
#[path = "it/context.rs"]
mod context;
#[path = "it/data_parallel.rs"]
mod data_parallel;
#[path = "it/ddp.rs"]
mod ddp;
#[path = "it/ddp_cases.rs"]
mod ddp_cases;
#[path = "it/ddp_faults.rs"]
mod ddp_faults;
#[path = "it/distributed_optimizer.rs"]
mod distributed_optimizer;
#[path = "it/gathered.rs"]
mod gathered;
#[path = "it/hooks.rs"]
mod hooks;
#[path = "it/net.rs"]
mod net;
#[path = "it/observer.rs"]
mod observer;
#[path = "it/offload.rs"]
mod offload;
#[path = "it/offload_optimizers.rs"]
mod offload_optimizers;
#[path = "it/offload_space.rs"]
mod offload_space;
#[path = "it/offload_units.rs"]
mod offload_units;
#[path = "it/pipeline.rs"]
mod pipeline;
#[path = "it/pipeline_agreement.rs"]
mod pipeline_agreement;
#[path = "it/pipeline_engine.rs"]
mod pipeline_engine;
#[path = "it/pipeline_faults.rs"]
mod pipeline_faults;
#[path = "it/pipeline_model.rs"]
mod pipeline_model;
#[path = "it/power_sgd.rs"]
mod power_sgd;
#[path = "it/pytorch_cases.rs"]
mod pytorch_cases;
#[path = "it/shard.rs"]
mod shard;
#[path = "it/shard_cases.rs"]
mod shard_cases;
#[path = "it/shard_faults.rs"]
mod shard_faults;
#[path = "it/shard_golden.rs"]
mod shard_golden;
#[path = "it/shard_nodes.rs"]
mod shard_nodes;
#[path = "it/shard_optimizers.rs"]
mod shard_optimizers;
#[path = "it/shard_windows.rs"]
mod shard_windows;
#[path = "it/tensor.rs"]
mod tensor;
#[path = "it/tensor_conversions.rs"]
mod tensor_conversions;
#[path = "it/tensor_cross_entropy.rs"]
mod tensor_cross_entropy;
#[path = "it/tensor_evaluation.rs"]
mod tensor_evaluation;
#[path = "it/tensor_model.rs"]
mod tensor_model;
#[path = "it/uneven.rs"]
mod uneven;
