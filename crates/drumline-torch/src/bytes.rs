//! A tensor's memory as bytes, without a copy, to write tensors to files and to read them.
//!
//! Not here: tensors on a GPU or with gaps, which the caller copies first.
#![allow(unsafe_code)]

use tch::{Device, Tensor};

use crate::error::TorchError;

/// The bytes of a contiguous tensor in host memory.
///
/// Handles of one tensor share its memory. While the bytes are borrowed, nothing may be written through another handle.
///
/// ```
/// let tensor = tch::Tensor::from_slice(&[1i32, 256]);
/// assert_eq!(drumline_torch::bytes(&tensor)?, [1, 0, 0, 0, 0, 1, 0, 0]);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn bytes(tensor: &Tensor) -> Result<&[u8], TorchError> {
    let len = len(tensor)?;
    if len == 0 {
        return Ok(&[]);
    }
    // SAFETY: `len` has checked that there are that many contiguous bytes, which live as long as the handle.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), len) })
}

/// Like [`bytes()`], for writing. Any bit pattern is a value of every number type; a `bool` must stay 0 or 1.
pub fn bytes_mut(tensor: &mut Tensor) -> Result<&mut [u8], TorchError> {
    let len = len(tensor)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `bytes`; the borrow is unique.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), len) })
}

fn len(tensor: &Tensor) -> Result<usize, TorchError> {
    let unsupported = |reason| Err(TorchError::Unsupported { operation: "borrow a tensor's bytes", reason });
    if !tensor.defined() {
        return unsupported("it is undefined");
    }
    if tensor.is_sparse() || tensor.is_mkldnn() {
        return unsupported("it is not dense; try to_dense()");
    }
    if tensor.device() != Device::Cpu {
        return unsupported("it is not in host memory; try to_device(Device::Cpu)");
    }
    if !tensor.is_contiguous() {
        return unsupported("it is not contiguous; try contiguous()");
    }
    Ok(tensor.numel() * tensor.f_kind()?.elt_size_in_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn bytes_that_are_written_change_the_tensor() {
        let mut tensor = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        bytes_mut(&mut tensor).unwrap()[4..].copy_from_slice(&2.5f32.to_le_bytes());
        assert_eq!(Vec::<f32>::try_from(&tensor).unwrap(), [0.0, 2.5]);
        assert!(bytes(&Tensor::zeros([0, 3], (Kind::Double, Device::Cpu))).unwrap().is_empty());
        assert_eq!(bytes(&Tensor::from(true)).unwrap(), [1]);
    }

    #[test]
    fn a_tensor_that_is_not_contiguous_is_an_error() {
        let turned = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)).transpose(0, 1);
        let error = bytes(&turned).unwrap_err().to_string();
        assert!(error.ends_with("it is not contiguous; try contiguous()"), "{error}");
        assert!(bytes(&Tensor::new()).unwrap_err().to_string().ends_with("it is undefined"));
    }
}
