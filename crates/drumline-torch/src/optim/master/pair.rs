//! A 16-bit parameter and its f32 master weight.

use tch::{Kind, Tensor, no_grad};

use super::MasterKind;
use crate::error::TorchError;
use crate::grad::{grad, mark_written, set_grad};
use crate::memory_format::has_layout_of;
use crate::named::Named;
use crate::optim::halves::{join, split};

/// A parameter and its copy; the same tensor if it needs no copy, or is the high half of its master weight.
#[derive(Debug)]
pub(super) struct Pair {
    pub(super) parameter: Named,
    pub(super) master: Tensor,
    pub(super) low: Option<Tensor>,
    /// Master weights that were loaded and not split yet: the program may still load the parameter itself.
    pub(super) loaded: Option<Tensor>,
    /// What the program trains, if `parameter` is its twin.
    pub(super) of_twin: Option<Tensor>,
}

impl Pair {
    pub(super) fn new(parameter: &Named, kind: MasterKind) -> Result<Self, TorchError> {
        let tensor = &parameter.tensor;
        if kind == MasterKind::Split && matches!(tensor.kind(), Kind::BFloat16 | Kind::Half) {
            return Self::split(parameter);
        }
        let master = match tensor.kind() {
            Kind::BFloat16 | Kind::Half => {
                // Its values are those of the parameter at the first step.
                let (size, stride) = (tensor.size(), tensor.stride());
                tensor
                    .f_new_empty_strided(size, stride, (Kind::Float, tensor.device()))?
                    .set_requires_grad(true)
            }
            _ => tensor.shallow_clone(),
        };
        Ok(Self { parameter: parameter.clone(), master, low: None, loaded: None, of_twin: None })
    }

    fn split(parameter: &Named) -> Result<Self, TorchError> {
        let tensor = &parameter.tensor;
        if tensor.kind() != Kind::BFloat16 {
            let reason = "only parameters in bf16 have split master weights; try MasterKind::Copy";
            let cause = TorchError::Unsupported { operation: "split a master weight", reason };
            return Err(TorchError::Parameter { name: parameter.name.clone(), cause: Box::new(cause) });
        }
        let options = (Kind::Int16, tensor.device());
        let low = tensor.f_new_empty_strided(tensor.size(), tensor.stride(), options)?.f_zero_()?;
        let master = tensor.shallow_clone();
        Ok(Self { parameter: parameter.clone(), master, low: Some(low), loaded: None, of_twin: None })
    }

    /// The f32 master weight, as a new tensor if it is split.
    pub(super) fn whole(&self) -> Result<Tensor, TorchError> {
        let Some(low) = &self.low else { return Ok(self.master.f_detach()?) };
        if let Some(loaded) = &self.loaded {
            return Ok(loaded.shallow_clone());
        }
        join(&self.master, low)
    }

    /// Splits the master weights that were loaded.
    pub(super) fn split_loaded(&mut self) -> Result<(), TorchError> {
        if let (Some(loaded), Some(low)) = (self.loaded.take(), &mut self.low) {
            split(&loaded, &mut self.master.f_detach()?, low)?;
            mark_written(&self.master)?;
        }
        Ok(())
    }

    /// Refreshes the elements of the copy whose rounded value is not the parameter's: the program has changed those.
    pub(super) fn refresh(&mut self) -> Result<(), TorchError> {
        let (parameter, master) = (self.parameter.tensor.f_detach()?, self.master.f_detach()?);
        let is_own = parameter.f_eq_tensor(&master.f_to_kind(parameter.kind())?)?;
        let taken = master.f_where_self(&is_own, &parameter.f_to_kind(master.kind())?)?;
        Ok(no_grad(|| self.master.f_copy_(&taken))?)
    }

    /// Frees the memory of a copy that is not stepped: the wrapped optimizer still has the tensor.
    pub(super) fn free_copy(&mut self) -> Result<(), TorchError> {
        if self.master.kind() != self.parameter.tensor.kind() {
            self.master.f_set_data(&Tensor::f_empty([0], (self.master.kind(), self.master.device()))?)?;
        }
        Ok(())
    }

    /// The parameter as the program knows it.
    pub(super) fn of_program(&self) -> Named {
        let Named { name, tensor } = &self.parameter;
        Named { name: name.clone(), tensor: self.of_twin.as_ref().unwrap_or(tensor).shallow_clone() }
    }

    pub(super) fn is_copied(&self) -> bool {
        self.low.is_some() || self.parameter.tensor.kind() != self.master.kind()
    }

    /// A gradient, and the tensor for it in f32: the copy's gradient if it has one, so that a captured graph finds it
    /// again.
    pub(super) fn place(&self, found: &Tensor) -> Result<(Tensor, Tensor), TorchError> {
        let place = match grad(&self.master)? {
            Some(place) => place,
            None => {
                let made = no_grad(|| self.master.f_empty_like())?;
                set_grad(&self.master, Some(&made))?;
                made
            }
        };
        let found = with_strides_of(found, &place)?;
        Ok((place, found))
    }
}

/// The same tensor, with the strides of `like` for dims of size 1, where strides do not matter: libtorch copies lists
/// of tensors with equal strides in one kernel.
fn with_strides_of(tensor: &Tensor, like: &Tensor) -> Result<Tensor, TorchError> {
    let strides = like.stride();
    if !has_layout_of(tensor, like) || tensor.stride() == strides {
        return Ok(tensor.shallow_clone());
    }
    Ok(tensor.f_as_strided(tensor.size(), &strides[..], None)?)
}
