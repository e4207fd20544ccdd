//! What happens to the gradients of a backward: the interface between a step (`synced`) and a way to reduce gradients.
//!
//! ```text
//!   begin ─▶ autograd: note_ready(parameter), once for each gradient ─▶ finish: all gradients are reduced
//!                                            └─ a failure ─▶ abandon: the other ranks learn the cause
//! ```
//! `ddp` reduces whole gradients on all ranks, `shard` gives each rank its part of them.

use std::panic::Location;

use drumline_torch::FunctionError;

use crate::error::{NotRecordable, ParallelError};

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// A location in the program.
pub(crate) type Site = &'static Location<'static>;

/// A way to reduce gradients over ranks while backward runs.
pub(crate) trait Reduction: Send {
    /// Sets whether a backward without `begin` is allowed; its gradients are not reduced.
    fn allow_unreduced(&mut self, allowed: bool);

    /// Begins a backward that reduces. Its calls report `site` as their location.
    fn begin(&mut self, site: Site) -> Result;

    /// Autograd has accumulated the gradient of `param`. An error ends the backward. libtorch passes on only its text;
    /// [`refusal`](Self::refusal) returns the error itself.
    fn note_ready(&mut self, param: usize) -> std::result::Result<(), FunctionError>;

    /// The error with which `note_ready` has ended the backward, if it has.
    fn refusal(&mut self) -> Option<ParallelError>;

    /// Ends a backward: sends what is left, and waits for all reductions. Beside that it runs `meanwhile`, without which
    /// other ranks would not come to these reductions.
    fn finish(&mut self, meanwhile: Option<&mut dyn FnMut() -> Result>) -> Result;

    /// Backward failed on this rank. Aborts the group, because other ranks wait for its gradients.
    fn abandon(&mut self, cause: &str);

    /// The size in bytes of what is reduced together, in the order of reduction.
    fn reduced_bytes(&self) -> Vec<usize>;

    /// An error that says why, if a backward cannot be recorded in a CUDA graph.
    fn is_recordable(&self) -> std::result::Result<(), NotRecordable>;
}
