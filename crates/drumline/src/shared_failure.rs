//! A failure that all ranks know of: what can fail on one rank alone is put to all, so that they end together, with one text.
//!
//! ```text
//!   rank 0   Ok ───────────────┐                          Err("rank 1: no such file")   tells it
//!   rank 1   Err("no such …") ─┴─ agree: all ranks meet ─▶ Err("rank 1: no such file")   keeps quiet
//! ```

use std::any::Any;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};

use drumline_comm::{CommError, ProcessGroup};
use drumline_torch::cuda;
use serde::{Deserialize, Serialize};

use crate::loader::Cause;
use crate::run_error::RunError;

/// What went wrong on one rank or several; the same on all.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct SharedFailure {
    text: String,
    /// Who tells it; nobody where it was a panic, which has told itself.
    teller: Option<usize>,
}

impl SharedFailure {
    /// The rank that shows it, so that it is shown once; `None` if it has been shown.
    pub fn teller(&self) -> Option<usize> {
        self.teller
    }

    /// A failure that every rank has found by itself, from the same numbers.
    pub(crate) fn alike(text: String) -> Self {
        Self { text, teller: Some(0) }
    }

    /// What the ranks have to say, each different text once; `None` if nobody failed.
    pub(crate) fn of(said: &[Option<Trouble>]) -> Option<Self> {
        let mut ranks_of: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
        for (rank, trouble) in said.iter().enumerate() {
            if let Some(trouble) = trouble {
                ranks_of.entry(&trouble.text).or_default().push(rank);
            }
        }
        // The first rank that failed is heard first.
        let mut texts: Vec<_> = ranks_of.into_iter().collect();
        texts.sort_by_key(|(_, ranks)| ranks[0]);
        let lines: Vec<_> = texts.iter().map(|(text, ranks)| line(text, ranks, said.len())).collect();
        let is_told = said.iter().flatten().all(|trouble| trouble.is_told);
        let teller = if is_told { None } else { Some(0) };
        (!lines.is_empty()).then(|| Self { text: lines.join("\n"), teller })
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

/// An error for whoever runs the program: told without the callback that found it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PlainWords(pub String);

/// What went wrong on this rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trouble {
    pub(crate) text: String,
    /// A panic has told itself.
    is_told: bool,
    /// Its words need none on where it arose.
    is_plain: bool,
}

impl Trouble {
    /// The same trouble, with words on where it arose.
    pub(crate) fn within(self, place: &str) -> Self {
        if self.is_plain { self } else { Self { text: format!("{place}: {}", self.text), ..self } }
    }

    /// The same where a panic was kept from telling itself.
    pub(crate) fn untold(self) -> Self {
        Self { is_told: false, ..self }
    }
}

impl<E: Into<Cause>> From<E> for Trouble {
    fn from(error: E) -> Self {
        let cause = error.into();
        Self { text: in_words(cause.as_ref()), is_told: false, is_plain: cause.is::<PlainWords>() }
    }
}

/// An error and its causes in one line; a cause that is already part of what was said is not said again.
pub(crate) fn in_words(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).fold(String::new(), |said, cause| match said.is_empty() {
        true => cause,
        false if said.contains(&cause) => said,
        false => format!("{said}: {cause}"),
    })
}

/// Runs `body`; a panic in it is trouble like an error.
pub(crate) fn guarded<T>(body: impl FnOnce() -> Result<T, Cause>) -> Result<T, Trouble> {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(outcome) => Ok(outcome?),
        Err(panic) => {
            let text = panic_words(&*panic);
            // The panic has told that the memory of a GPU is full, but not who has it.
            Err(match cuda::out_of_memory(&text) {
                Some(text) => Trouble { text, is_told: false, is_plain: false },
                None => Trouble { text, is_told: true, is_plain: false },
            })
        }
    }
}

/// The words of a panic.
pub(crate) fn panic_words(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.as_deref().unwrap_or("no message"))
}

/// The outcome if all ranks had a good one; otherwise what went wrong, the same on all. Every rank calls it.
#[track_caller]
pub(crate) fn agree<T, E>(group: &ProcessGroup, outcome: Result<T, Trouble>) -> Result<T, E>
where
    E: From<SharedFailure> + From<CommError>,
{
    let all = group.all_gather_object(&outcome.as_ref().err().cloned())?;
    match (SharedFailure::of(&all), outcome) {
        (None, Ok(outcome)) => Ok(outcome),
        (Some(failure), _) => Err(failure.into()),
        (None, Err(trouble)) => Err(SharedFailure::alike(trouble.text).into()),
    }
}

/// The outcome if all ranks had a good one; otherwise what went wrong, the same on all of them, and [`exit_code`](crate::exit_code) shows it once. Every
/// rank calls it: where one may fail alone, and the others would wait for it.
///
/// ```no_run
/// use drumline::{ProcessGroup, agree_on};
///
/// let group = ProcessGroup::from_env()?;
/// let text = agree_on(&group, std::fs::read_to_string("data/words.txt"))?;
/// # let _ = text;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[track_caller]
pub fn agree_on<T, E: Into<Cause>>(group: &ProcessGroup, outcome: Result<T, E>) -> Result<T, RunError> {
    agree(group, outcome.map_err(Trouble::from))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(texts: &[Option<&str>]) -> Option<String> {
        let texts: Vec<_> = texts.iter().map(|text| text.map(Trouble::from)).collect();
        SharedFailure::of(&texts).map(|failure| failure.to_string())
    }

    #[test]
    fn each_text_is_told_once_with_its_ranks() {
        assert_eq!(said(&[None, None]), None);
        assert_eq!(said(&[Some("no file"), Some("no file")]).unwrap(), "no file");
        assert_eq!(said(&[None, Some("no file")]).unwrap(), "rank 1: no file");
        let mixed = said(&[None, Some("b"), Some("a"), Some("b")]).unwrap();
        assert_eq!(mixed, "ranks 1, 3: b\nrank 2: a");
    }

    #[test]
    fn a_panic_is_trouble_that_has_told_itself() {
        let trouble = guarded::<()>(|| panic!("on purpose")).unwrap_err();
        assert_eq!(trouble.text, "panicked: on purpose");
        assert_eq!(SharedFailure::of(&[None, Some(trouble)]).unwrap().teller(), None);
        let trouble = guarded::<()>(|| Err("plainly".into())).unwrap_err();
        assert_eq!(SharedFailure::of(&[None, Some(trouble)]).unwrap().teller(), Some(0));
    }

    #[test]
    fn a_model_that_fills_a_gpu_is_told_of_with_what_to_try() {
        let trouble = guarded::<()>(|| {
            panic!("Torch(\"CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has …\")")
        });
        let trouble = trouble.unwrap_err();
        assert!(
            trouble.text.starts_with("GPU 1 is out of memory: 2.00 GiB was asked for"),
            "{}",
            trouble.text
        );
        assert!(trouble.text.contains("try a smaller batch"), "{}", trouble.text);
        assert_eq!(
            SharedFailure::of(&[None, Some(trouble)]).unwrap().teller(),
            Some(0),
            "it is still to be told"
        );
    }
}
