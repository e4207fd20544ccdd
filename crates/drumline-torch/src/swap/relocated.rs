//! A tensor whose memory is moved, while all handles of it stay valid.
#![allow(unsafe_code)]

use std::ffi::c_void;

use tch::{Device, Tensor};
use torch_sys::C_tensor;

use super::pages::Pages;
use crate::error::TorchError;
use crate::saved_tensors::Storage;
use crate::status::{Closure, Message, check};

unsafe extern "C" {
    fn drumline_storage_move(tensor: *const C_tensor, address: *mut c_void, owner: Closure) -> Message;
}

/// A tensor in host memory that has its memory for itself.
#[derive(Debug)]
pub struct Relocated {
    tensor: Tensor,
    num_bytes: usize,
}

impl Relocated {
    /// `None` if other tensors, or elements that are not of it, are in its memory, or it is not in host memory.
    pub fn new(tensor: &Tensor) -> Result<Option<Self>, TorchError> {
        if !tensor.defined() || tensor.device() != Device::Cpu || tensor.is_sparse() || tensor.is_mkldnn() {
            return Ok(None);
        }
        let num_bytes = tensor.numel() * tensor.f_kind()?.elt_size_in_bytes();
        let Storage { address, bytes } = Storage::of(tensor);
        let whole = address..address + bytes;
        let relocated = Self { tensor: tensor.shallow_clone(), num_bytes };
        Ok((whole == (relocated.address()..relocated.address() + num_bytes)).then_some(relocated))
    }

    /// The bytes of its elements.
    pub fn num_bytes(&self) -> usize {
        self.num_bytes
    }

    fn address(&self) -> usize {
        self.tensor.data_ptr() as usize
    }

    /// Whether it is at this place.
    pub fn is_at(&self, pages: &Pages, offset: usize) -> bool {
        self.address() == pages.address(offset)
    }

    /// Whether it is anywhere in these pages.
    pub fn is_within(&self, pages: &Pages) -> bool {
        (pages.address(0)..pages.address(pages.num_bytes())).contains(&self.address())
    }

    /// Its elements, in the order in which they are in memory.
    pub fn bytes(&self) -> &[u8] {
        if self.num_bytes == 0 {
            return &[];
        }
        // SAFETY: `new` has checked that the memory is that of this tensor, which lives as long as the handle.
        unsafe { std::slice::from_raw_parts(self.tensor.data_ptr().cast::<u8>(), self.num_bytes) }
    }

    /// From now on its elements are those at this place. Nothing is copied.
    pub fn move_to(&self, pages: &Pages, offset: usize) -> Result<(), TorchError> {
        if offset + self.num_bytes > pages.num_bytes() {
            let expected = format!("at most {}", pages.num_bytes() - self.num_bytes.min(pages.num_bytes()));
            return Err(TorchError::value("the place of a tensor", offset, expected));
        }
        let address = pages.address(offset) as *mut c_void;
        // SAFETY: the handle is valid for the call; the memory is as large as the tensor, and the storage keeps it.
        let message =
            unsafe { drumline_storage_move(self.tensor.as_ptr(), address, Closure::keeping(pages.clone())) };
        check(message, "cannot move a tensor")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::swap::PAGE;

    #[test]
    fn all_handles_see_where_a_tensor_is() {
        let tensor = Tensor::from_slice(&[1f32, 2.0, 3.0]);
        let other = tensor.detach();
        let relocated = Relocated::new(&tensor).unwrap().unwrap();
        let pages = Pages::zeros(PAGE).unwrap();
        pages.bytes_mut(64..76).copy_from_slice(relocated.bytes());
        relocated.move_to(&pages, 64).unwrap();
        assert!(relocated.is_at(&pages, 64) && !relocated.is_at(&pages, 0));
        let _ = tensor.shallow_clone().fill_(7.0);
        assert_eq!(Vec::<f32>::try_from(&other).unwrap(), [7.0; 3]);
        assert_eq!(pages.bytes_mut(64..68), 7f32.to_ne_bytes());
        drop((relocated, pages, tensor));
        assert_eq!(Vec::<f32>::try_from(&other).unwrap(), [7.0; 3], "the last tensor keeps the memory");
    }

    #[test]
    fn a_tensor_with_other_elements_beside_it_stays() {
        let whole = Tensor::zeros([4], (tch::Kind::Float, Device::Cpu));
        assert!(Relocated::new(&whole.narrow(0, 0, 2)).unwrap().is_none());
        assert!(Relocated::new(&whole.narrow(0, 2, 2)).unwrap().is_none());
        assert!(Relocated::new(&whole.view([2, 2])).unwrap().is_some());
        assert!(Relocated::new(&Tensor::new()).unwrap().is_none());
        let pages = Pages::zeros(PAGE).unwrap();
        let error = Relocated::new(&whole).unwrap().unwrap().move_to(&pages, PAGE - 8).unwrap_err();
        assert!(error.to_string().contains("the place of a tensor is 4088"), "{error}");
    }
}
