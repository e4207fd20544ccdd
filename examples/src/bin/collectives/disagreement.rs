//! What happens when ranks do not make the same call: an error on all of them, at once, that says who called what.

use anyhow::bail;
use drumline_comm::{CommError, ProcessGroup, ReduceOp};

use crate::picture::Painter;

pub(crate) fn show(group: &ProcessGroup, painter: &Painter) -> anyhow::Result<()> {
    // A group cannot be used after a disagreement, so the mistake is made in a second group.
    let everyone: Vec<usize> = (0..group.size()).collect();
    let Some(doomed) = group.new_group(&everyone)? else { bail!("this rank should be in the group of all") };

    let len = if group.rank() == 1 { 3 } else { 4 };
    let outcome = doomed.all_reduce(&mut vec![1.0f32; len], ReduceOp::Sum);

    let seen = matches!(outcome, Err(CommError::Mismatch { .. } | CommError::CalledOff { .. }));
    let seen_by_all = group.all_gather_object(&seen)?; // the first group still works
    match outcome {
        Err(error) if seen_by_all.iter().all(|seen| *seen) => {
            painter.disagreement(doomed.name(), &error.to_string());
        }
        other => bail!("all ranks should have seen that they disagree: {seen_by_all:?}; here: {other:?}"),
    }
    Ok(())
}
