//! Ranks that are given different things would train past each other: what each was given is put to all, and so is what makes no sense.

use std::time::Duration;

use drumline_comm::ProcessGroup;

use crate::run_error::RunError;
use crate::shared_failure::{SharedFailure, Trouble, agree};

/// How long the others have to come to the same mistake.
const SOON: Duration = Duration::from_secs(5);

/// Names and values of what a rank was given.
pub(crate) type Given = Vec<(String, String)>;

/// An error on all ranks, with one text, if one has trouble or was given something else than rank 0. All ranks call it.
#[track_caller]
pub(crate) fn check_alike(
    group: &ProcessGroup,
    what: &str,
    own: Result<Given, Trouble>,
) -> Result<(), RunError> {
    let all: Vec<Result<Given, Trouble>> = group.all_gather_object(&own)?;
    let troubles: Vec<_> = all.iter().map(|given| given.as_ref().err().cloned()).collect();
    if let Some(failure) = SharedFailure::of(&troubles) {
        return Err(failure.into());
    }
    let all: Vec<Given> = all.into_iter().flatten().collect();
    match difference(&all) {
        None => Ok(()),
        Some((rank, difference)) => Err(SharedFailure::alike(format!(
            "rank {rank} was given another {what} than rank 0: {difference}; try the same on all ranks"
        ))
        .into()),
    }
}

/// An error on all ranks, with one text, if a rank was given something else than rank 0: names and values, in the same order. Every rank calls it, before
/// work that goes wrong where ranks differ.
///
/// ```
/// use drumline::{LocalGroup, ensure_alike};
///
/// let told = LocalGroup::run(2, |group| {
///     let given = vec![("batch size".to_owned(), (32 + group.rank()).to_string())];
///     Ok(ensure_alike(&group, "configuration", given).unwrap_err().to_string())
/// })?;
/// let text = "rank 1 was given another configuration than rank 0: batch size is 33, expected 32; try the same on all ranks";
/// assert_eq!(told, [text; 2]);
/// # Ok::<(), drumline::CommError>(())
/// ```
#[track_caller]
pub fn ensure_alike(group: &ProcessGroup, what: &str, given: Vec<(String, String)>) -> Result<(), RunError> {
    check_alike(group, what, Ok(given))
}

/// The error of a mistake that ranks make alike, as they run one program: where the others have made it, too, one for all. A rank that is alone with it,
/// while the others wait for it elsewhere, tells of it itself.
#[track_caller]
pub(crate) fn mistake(group: &ProcessGroup, text: &str) -> RunError {
    let met = group.monitored_barrier(SOON).map_err(RunError::from);
    match met.and_then(|()| agree::<(), RunError>(group, Err(text.into()))) {
        Err(error) if error.is_agreed() => error,
        _ => RunError::Unfit(text.to_owned()),
    }
}

/// The first rank that differs from rank 0, and how.
fn difference(all: &[Given]) -> Option<(usize, String)> {
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
    fn all_ranks_get_the_same_words() {
        let given = |value: usize| vec![("batch size".to_owned(), value.to_string())];
        let said = |own: &(dyn Fn(usize) -> Result<Given, Trouble> + Sync)| {
            let outcomes = LocalGroup::run(3, |group| Ok(check_alike(&group, "loader", own(group.rank()))));
            let texts = outcomes.unwrap().into_iter().map(|outcome| outcome.err().map(|e| e.to_string()));
            texts.collect::<Vec<_>>()
        };
        assert_eq!(said(&|_| Ok(given(4))), vec![None; 3]);
        let expected = "rank 2 was given another loader than rank 0: batch size is 8, expected 4; try the same on all ranks";
        assert_eq!(said(&|rank| Ok(given(4 << (rank / 2)))), vec![Some(expected.to_owned()); 3]);
        let expected = "rank 1: no such file";
        let trouble = |rank| if rank == 1 { Err(Trouble::from("no such file")) } else { Ok(given(rank)) };
        assert_eq!(said(&trouble), vec![Some(expected.to_owned()); 3]);
    }
}
