//! Tensors of rank 0, made anew on all other ranks.

use drumline_comm::ProcessGroup;
use drumline_torch::{Named, bytes_mut};

use super::error::CheckpointError;
use super::tensor_file::Spec;

/// Rank 0's tensors, which only rank 0 gives, on all ranks. They are contiguous and in the CPU's memory.
#[track_caller]
pub(super) fn broadcast(
    tensors: Option<Vec<Named>>,
    group: &ProcessGroup,
) -> Result<Vec<Named>, CheckpointError> {
    let specs = tensors.as_ref().map(|tensors| tensors.iter().map(Spec::of).collect::<Result<Vec<_>, _>>());
    let specs = group.broadcast_object(specs.transpose()?.as_ref(), 0)?;
    let mut tensors = match tensors {
        Some(tensors) => tensors,
        None => specs.into_iter().map(Spec::empty).collect::<Result<_, _>>()?,
    };
    for named in &mut tensors {
        group.broadcast(bytes_mut(&mut named.tensor)?, 0)?;
    }
    Ok(tensors)
}
