//! Element types that both libtorch and safetensors have.

use ::safetensors::tensor::Dtype;
use drumline_torch::TorchError;
use tch::{Device, Kind, Tensor};

use super::SafetensorsError;

const PAIRS: [(Kind, Dtype); 14] = [
    (Kind::Double, Dtype::F64),
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Float8e5m2, Dtype::F8_E5M2),
    (Kind::Float8e4m3fn, Dtype::F8_E4M3),
    (Kind::Float8e5m2fnuz, Dtype::F8_E5M2FNUZ),
    (Kind::Float8e4m3fnuz, Dtype::F8_E4M3FNUZ),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

/// The type of a tensor's elements in a file.
pub(in super::super) fn dtype_of(name: &str, tensor: &Tensor) -> Result<Dtype, SafetensorsError> {
    let unsavable = |cause: String| SafetensorsError::Unsavable { name: name.to_owned(), cause };
    if !tensor.defined() {
        return Err(unsavable("it is undefined".into()));
    }
    let kind = tensor.f_kind().map_err(|error| unsavable(TorchError::from(error).to_string()))?;
    let pair = PAIRS.iter().find(|(ours, _)| *ours == kind);
    pair.map(|(_, dtype)| *dtype).ok_or_else(|| unsavable(format!("safetensors has no type for {kind:?}")))
}

/// The number of bytes of an element.
pub(in super::super) fn size_of(dtype: Dtype) -> usize {
    dtype.bitsize() / 8
}

/// libtorch's type for the elements of a tensor in a file.
pub(in super::super) fn kind_of(name: &str, dtype: Dtype) -> Result<Kind, SafetensorsError> {
    let kind = PAIRS.iter().find(|(_, theirs)| *theirs == dtype).map(|(kind, _)| *kind);
    kind.ok_or_else(|| SafetensorsError::NoKind { name: name.to_owned(), dtype })
}

/// A tensor in host memory, with uninitialised values.
pub(in super::super) fn empty(name: &str, dtype: Dtype, shape: &[usize]) -> Result<Tensor, SafetensorsError> {
    let kind = kind_of(name, dtype)?;
    let shape: Vec<i64> = shape.iter().map(|size| *size as i64).collect();
    Ok(Tensor::f_empty(&shape, (kind, Device::Cpu)).map_err(TorchError::from)?)
}
