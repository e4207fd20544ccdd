//! A failure on one rank becomes an error on all ranks, with the same text, so that they end together.
//!
//! ```text
//!   rank 0   Ok ───────────────┐                          Err("rank 1: no such file")   shows it
//!   rank 1   Err("no such …") ─┴─ agree: all ranks meet ─▶ Err("rank 1: no such file")   is silent
//! ```

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use drumline_comm::{CommError, ProcessGroup, panic_text};
use drumline_torch::cuda;
use serde::{Deserialize, Serialize};

use crate::data::loader::Cause;
use crate::run_error::RunError;

/// A failure on one or several ranks, with the same text on all ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct SharedFailure {
    text: String,
    /// The rank that shows it. `None` for a panic, which was printed already.
    reporter: Option<usize>,
}

impl SharedFailure {
    /// The rank that should show it, so that it is shown once; `None` if it was shown already.
    pub fn reporting_rank(&self) -> Option<usize> {
        self.reporter
    }

    /// A failure that every rank has found by itself, from the same values.
    pub(crate) fn on_all_ranks(text: String) -> Self {
        Self { text, reporter: Some(0) }
    }

    /// Combines the failures of all ranks, each different text once; `None` if no rank failed.
    pub(crate) fn of(failures: &[Option<LocalFailure>]) -> Option<Self> {
        let mut ranks_of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (rank, failure) in failures.iter().enumerate() {
            if let Some(failure) = failure {
                ranks_of.entry(&failure.text).or_default().push(rank);
            }
        }
        // The failure of the first rank comes first.
        let mut texts: Vec<_> = ranks_of.into_iter().collect();
        texts.sort_by_key(|(_, ranks)| ranks[0]);
        let lines: Vec<_> = texts.iter().map(|(text, ranks)| line(text, ranks, failures.len())).collect();
        let is_shown = failures.iter().flatten().all(|failure| failure.is_shown);
        let reporter = if is_shown { None } else { Some(0) };
        (!lines.is_empty()).then(|| Self { text: lines.join("\n"), reporter })
    }
}

fn line(text: &str, ranks: &[usize], world_size: usize) -> String {
    match ranks {
        _ if ranks.len() == world_size => text.to_owned(),
        [rank] => format!("rank {rank}: {text}"),
        _ => {
            let ranks: Vec<_> = ranks.iter().map(ToString::to_string).collect();
            format!("ranks {}: {text}", ranks.join(", "))
        }
    }
}

/// An error message for the user of the program. It is shown without the name of the callback that returned it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct UserError(pub String);

/// A failure on this rank, which the other ranks do not know yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LocalFailure {
    pub(crate) text: String,
    /// Whether it was printed already, as panics are.
    is_shown: bool,
    /// Whether the text needs no context.
    is_plain: bool,
}

impl LocalFailure {
    /// Adds the context in which it happened.
    pub(crate) fn within(self, place: &str) -> Self {
        if self.is_plain { self } else { Self { text: format!("{place}: {}", self.text), ..self } }
    }

    /// Marks a panic as not printed.
    pub(crate) fn still_to_show(self) -> Self {
        Self { is_shown: false, ..self }
    }
}

impl<E: Into<Cause>> From<E> for LocalFailure {
    fn from(error: E) -> Self {
        let cause = error.into();
        Self { text: with_causes(cause.as_ref()), is_shown: false, is_plain: cause.is::<UserError>() }
    }
}

/// An error and its causes in one line. A cause that the text contains already is not repeated.
pub(crate) fn with_causes(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).fold(String::new(), |message, cause| {
        if message.is_empty() {
            cause
        } else if message.contains(&cause) {
            message
        } else {
            format!("{message}: {cause}")
        }
    })
}

/// Runs `body`. A panic in it is a failure, as an error is.
pub(crate) fn guarded<T>(body: impl FnOnce() -> Result<T, Cause>) -> Result<T, LocalFailure> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(outcome) => Ok(outcome?),
        Err(panic) => {
            let text = panic_message(&*panic);
            // The panic message does not say who uses the GPU's memory, so it is shown again with that.
            Err(match cuda::GpuOutOfMemory::parse(&text) {
                Some(error) => LocalFailure { text: error.to_string(), is_shown: false, is_plain: false },
                None => LocalFailure { text, is_shown: true, is_plain: false },
            })
        }
    }
}

/// The message of a panic.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    format!("panicked: {}", panic_text(panic))
}

/// Returns the outcome if no rank failed, otherwise the same error on all ranks. Every rank calls it.
#[track_caller]
pub(crate) fn agree<T, E>(group: &ProcessGroup, outcome: Result<T, LocalFailure>) -> Result<T, E>
where
    E: From<SharedFailure> + From<CommError>,
{
    let all = group.all_gather_object(&outcome.as_ref().err().cloned())?;
    match (SharedFailure::of(&all), outcome) {
        (None, Ok(outcome)) => Ok(outcome),
        (Some(failure), _) => Err(failure.into()),
        (None, Err(failure)) => Err(SharedFailure::on_all_ranks(failure.text).into()),
    }
}

/// Returns the outcome if no rank failed, otherwise the same error on all ranks, which [`exit_code`](crate::exit_code)
/// shows once. Every rank calls it. Use it where one rank may fail alone and the others would wait for it.
///
/// ```no_run
/// use drumline::ProcessGroup;
/// use drumline::comm::agree_on;
///
/// let group = ProcessGroup::from_env()?;
/// let text = agree_on(&group, std::fs::read_to_string("data/words.txt"))?;
/// # let _ = text;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
pub fn agree_on<T, E: Into<Cause>>(group: &ProcessGroup, outcome: Result<T, E>) -> Result<T, RunError> {
    agree(group, outcome.map_err(LocalFailure::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(texts: &[Option<&str>]) -> Option<String> {
        let texts: Vec<_> = texts.iter().map(|text| text.map(LocalFailure::from)).collect();
        SharedFailure::of(&texts).map(|failure| failure.to_string())
    }

    #[test]
    fn each_text_is_shown_once_with_its_ranks() {
        assert_eq!(message(&[None, None]), None);
        assert_eq!(message(&[Some("no file"), Some("no file")]).unwrap(), "no file");
        assert_eq!(message(&[None, Some("no file")]).unwrap(), "rank 1: no file");
        let mixed = message(&[None, Some("b"), Some("a"), Some("b")]).unwrap();
        assert_eq!(mixed, "ranks 1, 3: b\nrank 2: a");
    }

    #[test]
    fn a_panic_is_a_failure_that_was_printed_already() {
        let failure = guarded::<()>(|| panic!("on purpose")).unwrap_err();
        assert_eq!(failure.text, "panicked: on purpose");
        assert_eq!(SharedFailure::of(&[None, Some(failure)]).unwrap().reporting_rank(), None);
        let failure = guarded::<()>(|| Err("plainly".into())).unwrap_err();
        assert_eq!(SharedFailure::of(&[None, Some(failure)]).unwrap().reporting_rank(), Some(0));
    }

    #[test]
    fn a_panic_for_gpu_memory_gets_advice() {
        let failure = guarded::<()>(|| {
            panic!("Torch(\"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has …\")")
        });
        let failure = failure.unwrap_err();
        assert!(
            failure.text.starts_with("GPU 1 is out of memory: 2.00 GiB was asked for"),
            "{}",
            failure.text
        );
        assert!(failure.text.contains("try a smaller batch"), "{}", failure.text);
        assert_eq!(
            SharedFailure::of(&[None, Some(failure)]).unwrap().reporting_rank(),
            Some(0),
            "it was not shown yet"
        );
    }
}
