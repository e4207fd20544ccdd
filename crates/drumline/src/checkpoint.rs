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
//!   DIR/bad-step-00000140                    found damaged; never loaded, counted or deleted
//!
//!   save: every rank's part ─gather─▶ rank 0 ─▶ DIR/.tmp-… ─fsync, rename, fsync─▶ `latest`, `best` ─▶ the oldest go
//!   load: rank 0 ─▶ `latest`, else the one before ─checked, broadcast─▶ every rank
//! ```
//!
//! One [`Checkpoints`] owns the folder of a run: it finds, loads, saves, and decides what is deleted. Only rank 0 touches the disk,
//! so the other ranks need not see the folder. An error of rank 0 is returned on all ranks.
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
mod finite;
mod folder;
mod load;
mod manifest;
mod model_file;
mod on_rank_zero;
mod repair;
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
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use drumline_torch::{OptimizerState, RngState};
pub use error::{CheckpointError, Refusal};
pub use load::{Loaded, Refused};
pub use repair::BestSaved;
pub(crate) use restore::check_model;
pub use restore::{check_optimizer, named, restore};
pub use save::Saved;
pub(crate) use scalar::Scalar;
pub use state::{Mark, Score, TrainState};

/// How many are kept unless the program says otherwise: one to fall back on.
const KEPT: NonZeroUsize = NonZeroUsize::new(2).expect("two is not zero");

/// Whose checkpoints they are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    /// The run's that saves them.
    Owner,
    /// Another's, which may be saving them at this moment.
    Reader,
}

/// What a warning is also given to.
type OnWarning = Arc<dyn Fn(&str) + Send + Sync>;

/// The checkpoints of a run, in a folder. One run owns a folder at a time; its clones are the same owner.
#[derive(Clone)]
pub struct Checkpoints {
    dir: PathBuf,
    keep_last: NonZeroUsize,
    keep_best: NonZeroUsize,
    role: Role,
    /// Those that loading has found damaged, and that have not been renamed yet.
    damaged: Arc<Mutex<BTreeSet<folder::Name>>>,
    on_warning: Option<OnWarning>,
}

impl Checkpoints {
    /// The run's own checkpoints in `dir`, which the first save makes. The last two and the best are kept.
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

    /// For a program that only looks at the checkpoints, such as an evaluation while the run trains: loading changes nothing on disk,
    /// and saving is an error.
    #[must_use]
    pub fn read_only(self) -> Self {
        Self { role: Role::Reader, ..self }
    }

    /// Also gives each warning to `log`, on rank 0.
    #[must_use]
    pub fn on_warning(self, log: impl Fn(&str) + Send + Sync + 'static) -> Self {
        Self { on_warning: Some(Arc::new(log)), ..self }
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

    /// Whether they are in this folder, by whatever name.
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

    /// Whether warnings are given to somebody.
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
