//! Checkpoints: all that a run needs to go on, on disk, whole or not at all.
//!
//! ```text
//!   DIR/step-00000120/manifest.json          where the run is, and size and checksum of each file
//!                     model.safetensors      weights, under PyTorch's names
//!                     trained.safetensors    the weights that are trained on, where those of the model are averages of them
//!                     optimizer.safetensors  the optimizer's tensors
//!                     rng.safetensors        each rank's random number generators
//!   DIR/latest ─▶ step-00000120              moved when the new one is safe on disk
//!   DIR/best   ─▶ step-00000060              and best-2, … where more are kept
//!
//!   save: every rank's part ─gather─▶ rank 0 ─▶ DIR/.tmp-… ─fsync, rename, fsync─▶ `latest`, `best` ─▶ the oldest go
//!   load: rank 0 ─▶ `latest`, else the one before ─checked, broadcast─▶ every rank
//! ```
//!
//! Only rank 0 touches the disk, so the other ranks need not see the folder. What it runs into, all ranks are told.
//!
//! ```no_run
//! use drumline::checkpoint::{Checkpoints, Mark, RngState, TrainState, named, restore};
//! # fn main() -> anyhow::Result<()> {
//! # let group = drumline::ProcessGroup::from_env()?;
//! # let vs = tch::nn::VarStore::new(tch::Device::Cpu);
//! let checkpoints = Checkpoints::new("out/checkpoints");
//! let mut state = TrainState::new(named(&vs))?;
//! if let Some(found) = checkpoints.load_latest(&group)? {
//!     restore(&state.model, &found.state.model)?;
//!     found.state.rng.restore()?;
//!     state.step = found.state.step;
//! }
//! // … train …
//! state.rng = RngState::capture()?;
//! checkpoints.save(&state, Mark::Latest, &group)?;
//! # Ok(())
//! # }
//! ```
//!
//! Not here: when to save, and where the state's values come from.

mod broadcast;
mod error;
mod folder;
mod load;
mod manifest;
mod on_rank_zero;
mod restore;
mod rng;
mod rotate;
mod save;
mod scalar;
mod state;
mod tensor_file;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

pub use drumline_torch::{OptimizerState, RngState};
pub use error::CheckpointError;
pub use load::{Loaded, Refused};
pub(crate) use restore::check_model;
pub use restore::{check_optimizer, named, restore};
pub use save::Saved;
pub(crate) use scalar::Scalar;
pub use state::{Mark, TrainState};

/// How many are kept unless the program says otherwise: one to fall back on.
const KEPT: NonZeroUsize = NonZeroUsize::new(2).expect("two is not zero");

/// A folder of checkpoints. One run writes to it at a time.
#[derive(Debug, Clone)]
pub struct Checkpoints {
    dir: PathBuf,
    keep_last: NonZeroUsize,
    keep_best: NonZeroUsize,
    /// Those that loading has refused.
    damaged: Arc<Mutex<BTreeSet<folder::Name>>>,
}

impl Checkpoints {
    /// Checkpoints in `dir`, which the first save makes. The last two and the best are kept.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), keep_last: KEPT, keep_best: NonZeroUsize::MIN, damaged: Arc::default() }
    }

    /// Keeps this many, and the best besides. With one there is nothing to fall back on when it is damaged.
    pub fn keep_last(self, num: NonZeroUsize) -> Self {
        Self { keep_last: num, ..self }
    }

    /// Keeps this many of the best: they are linked as `best`, `best-2`, …, as [`Mark::Place`] has put them.
    pub fn keep_best(self, num: NonZeroUsize) -> Self {
        Self { keep_best: num, ..self }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}
