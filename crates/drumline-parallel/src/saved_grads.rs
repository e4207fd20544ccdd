//! Gradients that are taken away for a while.

use drumline_torch::{Named, set_grad, take_grad};
use tch::Tensor;

/// Parameters have no gradients until this is dropped, and then those of before.
pub(crate) struct SavedGrads<'a> {
    params: &'a [Named],
    grads: Vec<Option<Tensor>>,
}

impl<'a> SavedGrads<'a> {
    pub(crate) fn of(params: &'a [Named]) -> Self {
        let grads = params.iter().map(|named| take_grad(&named.tensor).unwrap_or(None)).collect();
        Self { params, grads }
    }

    /// Whether the parameter at this place had a gradient.
    pub(crate) fn is_some(&self, place: usize) -> bool {
        self.grads[place].is_some()
    }

    /// Runs something while the parameters at these places have their gradients.
    pub(crate) fn with<T, E: From<drumline_torch::TorchError>>(
        &self,
        places: &[usize],
        body: impl FnOnce() -> Result<T, E>,
    ) -> Result<T, E> {
        let set = |place: &usize, grad: Option<&Tensor>| set_grad(&self.params[*place].tensor, grad);
        places.iter().try_for_each(|place| set(place, self.grads[*place].as_ref()))?;
        let result = body();
        places.iter().try_for_each(|place| set(place, None))?;
        result
    }
}

impl Drop for SavedGrads<'_> {
    fn drop(&mut self) {
        for (named, grad) in self.params.iter().zip(&self.grads) {
            // Setting a gradient that a parameter had does not fail.
            let _ = set_grad(&named.tensor, grad.as_ref());
        }
    }
}
