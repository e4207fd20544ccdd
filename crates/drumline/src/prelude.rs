//! The usual imports of a training program: `use drumline::prelude::*;`.
//!
//! ```no_run
//! use drumline::prelude::*;
//! use drumline::tch::{Device, nn};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let group = ProcessGroup::from_env()?;
//! let store = nn::VarStore::new(Device::Cpu);
//! let net = nn::linear(store.root(), 10, 2, Default::default());
//! let ddp = Ddp::new(net, &store, &group, DdpOptions::default())?;
//! let mut optimizer = Sgd::new(parameters(&store), SgdOptions { lr: 0.1, ..SgdOptions::default() })?;
//! # Ok(())
//! # }
//! ```

pub use crate::accelerator::Accelerator;
pub use crate::checkpoint::Checkpoints;
pub use crate::comm::{ProcessGroup, ReduceOp, TensorCollectives};
pub use crate::data::{
    Dataset, DistributedSampler, EvalSampler, Loader, LoaderOptions, MapDataset, Sample, Sampler,
    SamplerOptions,
};
pub use crate::engine::{Ddp, DdpOptions, SyncBatchNorm};
pub use crate::metrics::{MeanLoss, Metric, TopK, reduce_metrics};
pub use crate::optim::{Adam, AdamOptions, AdamW, Optimizer, Sgd, SgdOptions, parameters};
pub use crate::schedule::{Schedule, Warmup};
pub use crate::trainer::DistTrainer;
pub use crate::{
    LogOptions, StopRequest, Worker, exit_code, init_logging, is_master, local_device, main_first, spawn,
};
