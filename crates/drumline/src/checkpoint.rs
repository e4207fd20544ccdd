//! Checkpoints: everything that a run needs to resume, on disk, complete or not at all.
//!
//! ```text
//!   DIR/step-00000120/manifest.json          where the run and each tensor is, and what each file must be
//!                     model.safetensors      weights, under PyTorch's names
//!                     trained.safetensors    what is trained, where the weights of the model are averages
//!                     optimizer.safetensors  the optimizer's tensors
//!                     rng.safetensors        each rank's random number generators
//!   DIR/latest ─▶ step-00000120              moved when the new one is safe on disk
//!   DIR/best   ─▶ step-00000060              and best-2, … where more are kept
//!
//!   DIR/bad-step-00000140                    found damaged: never loaded, counted or deleted
//!
//!   save: all ranks' parts ─gather─▶ rank 0 ─▶ DIR/.tmp-… ─fsync, rename, fsync─▶ `latest`, `best` ─▶ delete old ones
//!   load: rank 0 ─▶ `latest`, or the fallback before it ─checked, broadcast─▶ every rank
//!   find: all ranks check it together, and then each reads the parts that it holds (sharded training)
//! ```
//!
//! The files know global tensors, not ranks: a file holds parts of tensors with the offsets at which they begin, in the
//! form of PyTorch's distributed checkpoints. Rank 0 writes one file for each section; in sharded training each rank
//! writes its own. [`ShardWriter`] and [`ShardReader`] write and read parts: any number of ranks reads what any other
//! number wrote.
//!
//! One [`Checkpoints`] owns the folder of a run: it finds, loads, saves, and decides what is deleted. Except in sharded
//! training, only rank 0 touches the disk, so the other ranks need not see the folder. An error of a rank is returned
//! on all ranks.
//!
//! ```no_run
//! use drumline::checkpoint::{Checkpoints, Mark, RngState, RunState, named, restore};
//! # fn main() -> anyhow::Result<()> {
//! # let group = drumline::ProcessGroup::from_env()?;
//! # let vs = tch::nn::VarStore::new(tch::Device::Cpu);
//! let checkpoints = Checkpoints::new("out/checkpoints");
//! let mut state = RunState::new(named(&vs))?;
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
//! [`RunState`] is what is saved. It is not [`trainer::TrainState`](crate::trainer::TrainState), the live state of a
//! training that callbacks see. Not here: when to save, and where the values of the state come from.

mod boxes;
mod broadcast;
pub mod deepspeed;
mod error;
mod find;
mod finite;
mod folder;
mod index;
mod layout;
mod load;
mod manifest;
mod model_file;
mod on_rank_zero;
mod read_sums;
mod region;
mod repair;
mod restore;
mod rng;
mod rotate;
pub mod safetensors;
mod save;
mod scalar;
mod section;
mod shard_reader;
mod shard_writer;
#[cfg(test)]
mod sharded_tests;
mod shards;
mod state;
pub(crate) mod tag;
mod unread;
mod whole_files;

use std::collections::BTreeSet;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use drumline_torch::{OptimizerState, RngState};
pub use error::{CheckpointError, Refusal};
pub use index::IndexError;
pub use layout::StateLayout;
pub(crate) use layout::{held_by, is_divided};
pub use load::{Loaded, Refused};
pub use read_sums::ReadSums;
pub use region::{NoSuchRegion, Region};
pub use repair::BestSaved;
pub(crate) use restore::check_model;
pub use restore::{check_optimizer, named, restore};
pub use save::Saved;
pub(crate) use scalar::Scalar;
pub use section::Section;
pub use shard_reader::ShardReader;
pub use shard_writer::{Shard, ShardWriter, TensorPart};
pub use state::{Mark, RunState, Score};
pub use tag::NoTag;
pub(crate) use unread::UnreadOptimizer;

/// How many checkpoints are kept by default: the latest, and one as a fallback.
const KEPT: NonZeroUsize = NonZeroUsize::new(2).expect("two is not zero");

/// What this program may do with the checkpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// It saves them, and repairs the folder.
    Owner,
    /// It only reads them, while another run may be saving them.
    Reader,
}

/// A function that also gets each warning.
type OnWarning = Arc<dyn Fn(&str) + Send + Sync>;

/// The checkpoints of a run, in a folder. One run owns a folder at a time; clones of this object are the same owner.
#[derive(Clone)]
pub struct Checkpoints {
    dir: PathBuf,
    keep_last: NonZeroUsize,
    keep_best: NonZeroUsize,
    role: Role,
    /// Checkpoints that loading has found damaged, and that have not been renamed yet.
    damaged: Arc<Mutex<BTreeSet<folder::Name>>>,
    on_warning: Option<OnWarning>,
}

impl Checkpoints {
    /// The run's own checkpoints in `dir`, which the first save creates. By default the last two and the best are kept.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self {
            dir: dir.into(),
            keep_last: KEPT,
            keep_best: NonZeroUsize::MIN,
            role: Role::Owner,
            damaged: Arc::default(),
            on_warning: None,
        }
    }

    /// Makes this read-only, for a program that only looks at the checkpoints, such as an evaluation while the run
    /// trains: loading changes nothing on disk, and saving is an error.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { role: Role::Reader, ..self }
    }

    /// Passes each warning also to `log`, on rank 0.
    #[must_use]
    pub fn on_warning(self, log: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { on_warning: Some(Arc::new(log)), ..self }
    }

    /// Keeps this many checkpoints, and the best besides. With one there is no fallback when it is damaged.
    pub fn keep_last(self, num: NonZeroUsize) -> Self {
        Self { keep_last: num, ..self }
    }

    /// Keeps this many of the best. They are linked as `best`, `best-2`, …, in the order of [`Mark::Place`].
    pub fn keep_best(self, num: NonZeroUsize) -> Self {
        Self { keep_best: num, ..self }
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Whether the checkpoints are in this folder, under any of its names.
    pub(crate) fn is_in(&self, folder: &Path) -> bool {
        let real = |path: &Path| std::fs::canonicalize(path).ok();
        self.dir == folder || real(&self.dir).is_some_and(|dir| real(folder) == Some(dir))
    }

    pub(crate) fn warn(&self, text: &str) {
        tracing::warn!("{text}");
        if let Some(log) = &self.on_warning {
            log(&format!("warning: {text}"));
        }
    }

    /// Whether there is an [`on_warning`](Self::on_warning) function.
    pub(crate) fn has_log(&self) -> bool {
        self.on_warning.is_some()
    }

    fn damaged(&self) -> MutexGuard<'_, BTreeSet<folder::Name>> {
        self.damaged.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<P: Into<PathBuf>> From<P> for Checkpoints {
    fn from(dir: P) -> Self {
        Self::new(dir)
    }
}

impl std::fmt::Debug for Checkpoints {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { dir, keep_last, keep_best, role, .. } = self;
        let mut shown = f.debug_struct("Checkpoints");
        shown.field("dir", dir).field("keep_last", keep_last).field("keep_best", keep_best);
        shown.field("role", role).finish_non_exhaustive()
    }
}
