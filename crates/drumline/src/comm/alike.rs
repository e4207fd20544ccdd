//! Checks that ranks have the same settings. Ranks with different settings would train different things; each rank's
//! values, or its failure to determine them, are exchanged, and all ranks get the same error.

use std::time::Duration;

use drumline_comm::ProcessGroup;

use crate::comm::shared_failure::{LocalFailure, SharedFailure, agree};
use crate::run_error::{RunError, UsageError};

/// How long a rank with a usage error waits for the others to make the same mistake.
const MEETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Names and values of a rank's settings.
pub(crate) type NamedValues = Vec<(String, String)>;

/// Returns an error on all ranks, with the same text, if one has failed or has other values than rank 0. All ranks call
/// it.
#[track_caller]
pub(crate) fn check_alike(
    group: &ProcessGroup,
    what: &str,
    own: &Result<NamedValues, LocalFailure>,
) -> Result<(), RunError> {
    let all: Vec<Result<NamedValues, LocalFailure>> = group.all_gather_object(own)?;
    let failures: Vec<_> = all.iter().map(|values| values.as_ref().err().cloned()).collect();
    if let Some(failure) = SharedFailure::of(&failures) {
        return Err(failure.into());
    }
    let all: Vec<NamedValues> = all.into_iter().flatten().collect();
    match difference(&all) {
        None => Ok(()),
        Some((rank, difference)) => Err(SharedFailure::on_all_ranks(format!(
            "rank {rank} was given another {what} than rank 0: {difference}; try the same on all ranks"
        ))
        .into()),
    }
}

/// Returns an error on all ranks, with the same text, if a rank has other values than rank 0: names and values, in the
/// same order. Every rank calls it, before work that fails if ranks differ.
///
/// ```
/// use drumline::comm::{LocalGroup, ensure_alike};
///
/// let messages = LocalGroup::run(2, |group| {
///     let values = vec![("batch size".to_owned(), (32 + group.rank()).to_string())];
///     Ok(ensure_alike(&group, "configuration", values).unwrap_err().to_string())
/// })?;
/// let text = "rank 1 was given another configuration than rank 0: batch size is 33, expected 32; \
///             try the same on all ranks";
/// assert_eq!(messages, [text; 2]);
/// # Ok::<(), drumline::CommError>(())
/// ```
#[track_caller]
pub fn ensure_alike(group: &ProcessGroup, what: &str, values: Vec<(String, String)>) -> Result<(), RunError> {
    check_alike(group, what, &Ok(values))
}

/// The error of a wrong call. Ranks run one program, so usually all make the same mistake and get one shared error. A
/// rank that is alone with it, while the others wait elsewhere, gets the error itself.
#[track_caller]
pub(crate) fn usage_error(group: &ProcessGroup, error: UsageError) -> RunError {
    let met = group.monitored_barrier(MEETING_TIMEOUT).map_err(RunError::from);
    match met.and_then(|()| agree::<(), RunError>(group, Err(error.into()))) {
        Err(agreed) if agreed.is_agreed() => agreed,
        _ => error.into(),
    }
}

/// The first rank that differs from rank 0, and how.
fn difference(all: &[NamedValues]) -> Option<(usize, String)> {
    all.iter().enumerate().find_map(|(rank, theirs)| {
        let ((name, first), (_, other)) = all[0].iter().zip(theirs).find(|(first, other)| first != other)?;
        Some((rank, format!("{name} is {other}, expected {first}")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use drumline_comm::LocalGroup;

    #[test]
    fn all_ranks_get_the_same_text() {
        let values = |value: usize| vec![("batch size".to_owned(), value.to_string())];
        let message = |own: &(dyn Fn(usize) -> Result<NamedValues, LocalFailure> + Sync)| {
            let outcomes = LocalGroup::run(3, |group| Ok(check_alike(&group, "loader", &own(group.rank()))));
            let texts = outcomes.unwrap().into_iter().map(|outcome| outcome.err().map(|e| e.to_string()));
            texts.collect::<Vec<_>>()
        };
        assert_eq!(message(&|_| Ok(values(4))), vec![None; 3]);
        let expected = "rank 2 was given another loader than rank 0: batch size is 8, expected 4; try the same on all ranks";
        assert_eq!(message(&|rank| Ok(values(4 << (rank / 2)))), vec![Some(expected.to_owned()); 3]);
        let expected = "rank 1: no such file";
        let failure =
            |rank| if rank == 1 { Err(LocalFailure::from("no such file")) } else { Ok(values(rank)) };
        assert_eq!(message(&failure), vec![Some(expected.to_owned()); 3]);
    }
}
