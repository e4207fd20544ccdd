//! Conversions between placements: a collective in forward, and the transposed one in backward.
//!
//! ```text
//!   from         to           forward          backward           Megatron's name
//!   Invariant    Replicated   –                all-reduce         copy to the region
//!   Partial      Invariant    all-reduce       –                  reduce from the region
//!   Sharded      Replicated   all-gather       reduce-scatter     gather from the sequence
//!   Partial      Sharded      reduce-scatter   all-gather         reduce-scatter to the sequence
//!   Invariant    Sharded      split            all-gather         scatter to the region
//!   Sharded      Invariant    all-gather       split              gather from the region
//! ```
//! All ranks of `tp` call them together, and backward in the same order. Each has the deadline of the group; its error
//! names the ranks that did not come, and the place in the program that asked for the conversion, in backward as well.

use drumline_comm::call_site;
use drumline_torch::{TorchError, autograd_function};
use tch::Tensor;

use super::ranks::{Site, TensorParallel};
use super::value::{Dim, Invariant, Partial, Replicated, Sharded, TpTensor};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;
type Made = std::result::Result<Tensor, TorchError>;

/// An autograd function of one tensor, from what it does in forward and in backward.
fn function(
    input: &Tensor,
    forward: impl FnOnce(&Tensor) -> Made,
    backward: impl Fn(&Tensor) -> Made + Send + 'static,
) -> Made {
    let outputs = autograd_function(
        &[input],
        |_, inputs| Ok(vec![forward(inputs[0])?]),
        move |_, grads| Ok(vec![grads[0].as_ref().map(&backward).transpose()?]),
    );
    Ok(outputs?.swap_remove(0))
}

fn same(tensor: &Tensor) -> Made {
    Ok(tensor.shallow_clone())
}

impl TpTensor<Invariant> {
    /// The same tensor for work that differs from rank to rank: backward sums its gradients.
    #[track_caller]
    pub fn replicate(&self) -> Result<TpTensor<Replicated>> {
        Ok(TpTensor::replicated(replicated(&self.tp, &self.local, call_site())?, &self.tp))
    }

    /// This rank's part along a dim.
    #[track_caller]
    pub fn split<D: Dim>(&self) -> Result<TpTensor<Sharded<D>>> {
        let (tp, site, dim) = (self.tp.clone(), call_site(), D::of(&self.local));
        let whole = self.local.size()[dim as usize];
        if !tp.is_cut() {
            return TpTensor::sharded(self.local.shallow_clone(), whole, &tp);
        }
        let part = function(
            &self.local,
            |whole| Ok(self.tp.own_part(whole, dim)?.f_contiguous()?),
            move |grad| tp.gathered(grad, dim, tp.cut(whole), site),
        )?;
        TpTensor::sharded(part, whole, &self.tp)
    }
}

impl TpTensor<Partial> {
    /// The sum over ranks.
    #[track_caller]
    pub fn sum(&self) -> Result<TpTensor<Invariant>> {
        let site = call_site();
        if !self.tp.is_cut() {
            return Ok(TpTensor::invariant(self.local.shallow_clone(), &self.tp));
        }
        let sum = function(&self.local, |own| self.tp.summed(own, site), same)?;
        Ok(TpTensor::invariant(sum, &self.tp))
    }

    /// This rank's part of the sum along a dim.
    #[track_caller]
    pub fn scatter<D: Dim>(&self) -> Result<TpTensor<Sharded<D>>> {
        let (tp, site, dim) = (self.tp.clone(), call_site(), D::of(&self.local));
        let whole = self.local.size()[dim as usize];
        if !tp.is_cut() {
            return TpTensor::sharded(self.local.shallow_clone(), whole, &tp);
        }
        let part = function(
            &self.local,
            |own| self.tp.scattered(own, dim, site),
            move |grad| tp.gathered(grad, dim, tp.cut(whole), site),
        )?;
        TpTensor::sharded(part, whole, &self.tp)
    }
}

impl<D: Dim> TpTensor<Sharded<D>> {
    /// The whole tensor for work that differs from rank to rank: backward sums its gradients, and each rank gets those of
    /// its part.
    #[track_caller]
    pub fn gather(&self) -> Result<TpTensor<Replicated>> {
        let (tp, site, dim) = (self.tp.clone(), call_site(), D::of(&self.local));
        if !tp.is_cut() {
            return Ok(TpTensor::replicated(self.local.shallow_clone(), &tp));
        }
        let whole = function(
            &self.local,
            |part| self.tp.gathered(part, dim, self.cut(), site),
            move |grad| tp.scattered(grad, dim, site),
        )?;
        Ok(TpTensor::replicated(whole, &self.tp))
    }

    /// The whole tensor for work that is the same on all ranks.
    #[track_caller]
    pub fn collect(&self) -> Result<TpTensor<Invariant>> {
        let (tp, site, dim) = (self.tp.clone(), call_site(), D::of(&self.local));
        if !tp.is_cut() {
            return Ok(TpTensor::invariant(self.local.shallow_clone(), &tp));
        }
        let whole = function(
            &self.local,
            |part| self.tp.gathered(part, dim, self.cut(), site),
            move |grad| tp.own_part(grad, dim),
        )?;
        Ok(TpTensor::invariant(whole, &self.tp))
    }
}

fn replicated(tp: &TensorParallel, tensor: &Tensor, site: Site) -> Made {
    if !tp.is_cut() {
        return same(tensor);
    }
    let ranks = tp.clone();
    function(tensor, same, move |grad| ranks.summed(grad, site))
}

impl TensorParallel {
    /// Invariant tensors, such as the weight and bias of a norm, for work that differs from rank to rank. Backward sums
    /// their gradients together, when it has all of them.
    #[track_caller]
    pub fn replicate_all<const N: usize>(&self, tensors: [&Tensor; N]) -> Result<[TpTensor<Replicated>; N]> {
        let (tp, site) = (self.clone(), call_site());
        if !tp.is_cut() {
            return Ok(tensors.map(|tensor| TpTensor::replicated(tensor.shallow_clone(), self)));
        }
        let zeros: Vec<_> = tensors.iter().map(|tensor| tensor.size()).collect();
        let options = tensors.map(|tensor| (tensor.kind(), tensor.device()));
        let outputs = autograd_function(
            &tensors,
            |_, inputs| Ok(inputs.iter().map(|input| input.shallow_clone()).collect()),
            move |cx, grads| {
                // All ranks make the same call, even if one has no gradient for some.
                let of_each = grads.into_iter().zip(zeros.iter().zip(&options));
                let grads = of_each.map(|(grad, (size, options))| {
                    grad.map_or_else(|| Tensor::f_zeros(size, *options).map_err(TorchError::from), Ok)
                });
                let grads = grads.collect::<std::result::Result<Vec<_>, _>>()?;
                let sums = tp.all_summed(&grads, site)?.into_iter().enumerate();
                Ok(sums.map(|(input, sum)| cx.needs_input_grad(input).then_some(sum)).collect())
            },
        )?;
        let mut outputs = outputs.into_iter().map(|output| TpTensor::replicated(output, self));
        let missing = ParallelError::Internal { what: "a function returned too few outputs" };
        let made: Vec<_> = outputs.by_ref().take(N).collect();
        made.try_into().map_err(|_| missing)
    }
}
