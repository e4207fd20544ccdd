//! Tensors that are put together from stretches of mapped files.

use std::ops::Range;
use std::path::PathBuf;

use ::safetensors::tensor::Dtype;
use drumline_pickle::{Dtype as SavedDtype, TensorInfo, TorchFile};
use drumline_torch::TorchError;
use tch::{Device, Kind, Tensor};

use super::super::safetensors::{Entry, SafetensorsError, elements, map_bytes};
use super::error::DeepSpeedError;

/// Elements that follow each other in a file.
#[derive(Debug, Clone)]
pub(super) struct Stretch {
    /// The file among those of the checkpoint.
    pub(super) file: usize,
    bytes: Range<u64>,
    kind: Kind,
}

/// The values of a tensor.
#[derive(Debug, Clone)]
enum Values {
    /// One stretch after the other.
    Joined(Vec<Stretch>),
    /// A tensor whose elements are in another order.
    Strided(Stretch, Vec<i64>),
    /// One number.
    Number(f64),
}

/// A tensor of the result.
#[derive(Debug, Clone)]
pub(super) struct Planned {
    pub(super) name: String,
    shape: Vec<u64>,
    /// Its type in the result: f32 for numbers, unchanged for others.
    kind: Kind,
    values: Values,
}

impl Stretch {
    /// Elements of a tensor of a file, which has them in order.
    pub(super) fn of(
        file: usize,
        tensor: &TensorInfo,
        torch_file: &TorchFile,
        range: Range<u64>,
    ) -> Result<Self, DeepSpeedError> {
        let size = tensor.dtype.size();
        let start = torch_file.bytes_of(tensor)?.start;
        let bytes = start + range.start * size..start + range.end * size;
        Ok(Self { file, bytes, kind: kind_of(tensor.dtype) })
    }
}

impl Planned {
    /// A tensor of this shape, made of stretches that have as many elements.
    pub(super) fn joined(name: String, shape: Vec<u64>, stretches: Vec<Stretch>) -> Self {
        let kind = stretches.first().map_or(Kind::Float, |first| in_result(first.kind));
        Self { name, shape, kind, values: Values::Joined(stretches) }
    }

    /// A tensor of a file.
    pub(super) fn whole(
        name: String,
        file: usize,
        tensor: &TensorInfo,
        torch_file: &TorchFile,
    ) -> Result<Self, DeepSpeedError> {
        let stretch = Stretch::of(file, tensor, torch_file, 0..tensor.span())?;
        let kind = in_result(stretch.kind);
        let is_in_order = tensor.span() == tensor.numel() && is_in_order(tensor);
        let values = if is_in_order {
            Values::Joined(vec![stretch])
        } else {
            Values::Strided(stretch, signed(&tensor.strides))
        };
        Ok(Self { name, shape: tensor.shape.clone(), kind, values })
    }

    /// A tensor without dims.
    pub(super) fn number(name: String, number: f64) -> Self {
        Self { name, shape: Vec::new(), kind: Kind::Float, values: Values::Number(number) }
    }

    /// The same tensor under another name.
    pub(super) fn renamed(&self, name: String) -> Self {
        Self { name, ..self.clone() }
    }

    /// Its place in the header of a file.
    pub(super) fn entry(&self) -> Entry {
        let shape: Vec<usize> = self.shape.iter().map(|size| *size as usize).collect();
        Entry {
            name: self.name.clone(),
            dtype: in_header(self.kind),
            offsets: vec![0; shape.len()],
            shape,
            bytes: 0..0,
        }
    }
}

/// The mapped files of a checkpoint.
pub(super) struct MappedFiles(Vec<Tensor>);

impl MappedFiles {
    pub(super) fn open(paths: &[PathBuf]) -> Result<Self, SafetensorsError> {
        Ok(Self(paths.iter().map(|path| map_bytes(path)).collect::<Result<_, _>>()?))
    }

    fn elements(&self, stretch: &Stretch) -> Result<Tensor, TorchError> {
        elements(&self.0[stretch.file], stretch.bytes.clone(), stretch.kind)
    }

    /// Puts a tensor together.
    pub(super) fn make(&self, planned: &Planned) -> Result<Tensor, TorchError> {
        let shape = signed(&planned.shape);
        match &planned.values {
            Values::Number(number) => Ok(Tensor::f_from_slice(&[*number as f32])?.f_view(&shape[..])?),
            Values::Strided(stretch, strides) => {
                let elements = self.elements(stretch)?;
                Ok(elements.f_as_strided(&shape[..], &strides[..], None)?.f_to_kind(planned.kind)?)
            }
            Values::Joined(stretches) => {
                let made = Tensor::f_empty(&shape[..], (planned.kind, Device::Cpu))?;
                let (flat, mut offset) = (made.f_view([-1])?, 0);
                for stretch in stretches {
                    let elements = self.elements(stretch)?;
                    let len = elements.numel() as i64;
                    flat.f_narrow(0, offset, len)?.f_copy_(&elements)?;
                    offset += len;
                }
                Ok(made)
            }
        }
    }
}

/// Whether neighbours in memory are neighbours along the last dim.
fn is_in_order(tensor: &TensorInfo) -> bool {
    let mut expected = 1;
    tensor.shape.iter().zip(&tensor.strides).rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == expected;
        expected *= size;
        fits
    })
}

fn signed(sizes: &[u64]) -> Vec<i64> {
    sizes.iter().map(|size| *size as i64).collect()
}

/// The type in the result of what was saved in this type.
fn in_result(kind: Kind) -> Kind {
    match kind {
        Kind::Int64 | Kind::Int | Kind::Int16 | Kind::Int8 | Kind::Uint8 | Kind::Bool => kind,
        _ => Kind::Float,
    }
}

fn kind_of(dtype: SavedDtype) -> Kind {
    match dtype {
        SavedDtype::Float64 => Kind::Double,
        SavedDtype::Float16 => Kind::Half,
        SavedDtype::BFloat16 => Kind::BFloat16,
        SavedDtype::Float8E4M3Fn => Kind::Float8e4m3fn,
        SavedDtype::Float8E5M2 => Kind::Float8e5m2,
        SavedDtype::Int64 => Kind::Int64,
        SavedDtype::Int32 => Kind::Int,
        SavedDtype::Int16 => Kind::Int16,
        SavedDtype::Int8 => Kind::Int8,
        SavedDtype::UInt8 => Kind::Uint8,
        SavedDtype::Bool => Kind::Bool,
        SavedDtype::Float32 => Kind::Float,
    }
}

fn in_header(kind: Kind) -> Dtype {
    match kind {
        Kind::Int64 => Dtype::I64,
        Kind::Int => Dtype::I32,
        Kind::Int16 => Dtype::I16,
        Kind::Int8 => Dtype::I8,
        Kind::Uint8 => Dtype::U8,
        Kind::Bool => Dtype::BOOL,
        _ => Dtype::F32,
    }
}
