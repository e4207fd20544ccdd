//! A tensor's memory as bytes, without a copy: how tensors get into files and out of them.
//!
//! Not here: tensors that are elsewhere or scattered, which the caller copies first.
#![allow(unsafe_code)]

use tch::{Device, Tensor};

use crate::error::TorchError;

/// The bytes of a contiguous tensor in the CPU's memory.
///
/// Handles of one tensor share its memory: as long as the bytes are borrowed, nothing may be written through another handle.
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
    // SAFETY: `len` has made sure of that many bytes in a row, which live as long as the handle.
    Ok(unsafe { std::slice::from_raw_parts(tensor.data_ptr().cast::<u8>(), len) })
}

/// As [`bytes()`], to be written to. All bit patterns are values of all number types; a `bool` must stay 0 or 1.
pub fn bytes_mut(tensor: &mut Tensor) -> Result<&mut [u8], TorchError> {
    let len = len(tensor)?;
    if len == 0 {
        return Ok(&mut []);
    }
    // SAFETY: as in `bytes`; the borrow is unique.
    Ok(unsafe { std::slice::from_raw_parts_mut(tensor.data_ptr().cast::<u8>(), len) })
}

fn len(tensor: &Tensor) -> Result<usize, TorchError> {
    let unfit = |what: &str| Err(TorchError::Unfit(format!("a tensor's bytes cannot be had: {what}")));
    if !tensor.defined() {
        return unfit("it is undefined");
    }
    if tensor.is_sparse() || tensor.is_mkldnn() {
        return unfit("it is not dense; try to_dense()");
    }
    if tensor.device() != Device::Cpu {
        return unfit("it is not in the CPU's memory; try to_device(Device::Cpu)");
    }
    if !tensor.is_contiguous() {
        return unfit("it is not contiguous; try contiguous()");
    }
    Ok(tensor.numel() * tensor.f_kind()?.elt_size_in_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Kind;

    #[test]
    fn what_is_written_is_in_the_tensor() {
        let mut tensor = Tensor::zeros([2], (Kind::Float, Device::Cpu));
        bytes_mut(&mut tensor).unwrap()[4..].copy_from_slice(&2.5f32.to_le_bytes());
        assert_eq!(Vec::<f32>::try_from(&tensor).unwrap(), [0.0, 2.5]);
        assert!(bytes(&Tensor::zeros([0, 3], (Kind::Double, Device::Cpu))).unwrap().is_empty());
        assert_eq!(bytes(&Tensor::from(true)).unwrap(), [1]);
    }

    #[test]
    fn what_has_no_bytes_in_a_row_is_refused() {
        let turned = Tensor::zeros([2, 3], (Kind::Float, Device::Cpu)).transpose(0, 1);
        let error = bytes(&turned).unwrap_err().to_string();
        assert!(error.ends_with("it is not contiguous; try contiguous()"), "{error}");
        assert!(bytes(&Tensor::new()).unwrap_err().to_string().ends_with("it is undefined"));
    }
}
