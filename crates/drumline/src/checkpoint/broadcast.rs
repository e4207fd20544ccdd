//! Tensors of rank 0, copied to all other ranks.

use ::safetensors::tensor::Dtype;
use drumline_comm::ProcessGroup;
use drumline_torch::{Named, bytes_mut};

use super::error::CheckpointError;
use super::safetensors::{SafetensorsError, dtype_of, empty};

/// A tensor without its values.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Spec {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl Spec {
    fn of(Named { name, tensor }: &Named) -> Result<Self, SafetensorsError> {
        let dtype = dtype_of(name, tensor)?;
        let shape = tensor.size().into_iter().map(|size| size as usize).collect();
        Ok(Self { name: name.clone(), dtype, shape })
    }

    /// A tensor like this, with uninitialised values.
    fn empty(self) -> Result<Named, SafetensorsError> {
        Ok(Named { tensor: empty(&self.name, self.dtype, &self.shape)?, name: self.name })
    }
}

/// Copies the tensors of rank 0, which only rank 0 passes, to all ranks. They are contiguous and in host memory.
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
