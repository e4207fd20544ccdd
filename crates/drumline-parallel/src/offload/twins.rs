//! Parameters of one unit on the device, and their twins in host memory, which the CPU steps.
//!
//! ```text
//!   device   parameter ◀─────────────── sent ──────────────┐      gradient ── fetched ─┐
//!   host     twin, with the optimizer's state ─ step ──────┘      slot ◀───────────────┘
//! ```
//! A twin has the values of its parameter after each step. If the program writes to the parameter, the twin is written
//! before the next step.

use drumline_torch::{Named, Pages, grad, set_grad, tensor_within};
use tch::Tensor;

use super::Result;
use super::reservation::Stepped;
use super::unit::LINE;

/// A unit that the CPU steps.
pub(super) struct TwinUnit {
    pub(super) twins: Vec<Twin>,
}

/// A parameter and its twin.
pub(super) struct Twin {
    pub(super) parameter: Named,
    pub(super) host: Tensor,
    /// The place of its gradient in each slot.
    grads: Vec<Tensor>,
    /// Whether it makes the step that has begun.
    is_stepped: bool,
    /// The autograd version of the parameter when the twin had its values.
    version: Option<i64>,
}

fn num_bytes(tensor: &Tensor) -> usize {
    tensor.numel() * tensor.kind().elt_size_in_bytes()
}

/// The bytes of tensors like these, one after the other.
pub(super) fn bytes_of(unit: &[Stepped]) -> usize {
    unit.iter().map(|stepped| num_bytes(&stepped.named.tensor).next_multiple_of(LINE)).sum()
}

/// A tensor like another one, at this byte.
fn at(pages: &Pages, offset: usize, like: &Tensor) -> Result<Tensor> {
    Ok(tensor_within(&pages.tensor(offset, like.kind(), like.numel())?, 0, &like.f_detach()?)?)
}

impl TwinUnit {
    /// Twins from this byte of `weights` on, whose gradients are in slots.
    pub(super) fn new(unit: Vec<Stepped>, weights: &Pages, start: usize, slots: &[Pages]) -> Result<Self> {
        let mut offset = 0;
        let twin = |Stepped { named, .. }: Stepped| {
            let like = &named.tensor;
            let host = at(weights, start + offset, like)?.f_set_requires_grad(true)?;
            let grads = slots.iter().map(|slot| at(slot, offset, like)).collect::<Result<_>>()?;
            offset += num_bytes(like).next_multiple_of(LINE);
            Ok(Twin { parameter: named, host, grads, is_stepped: false, version: None })
        };
        Ok(Self { twins: unit.into_iter().map(twin).collect::<Result<_>>()? })
    }

    /// Whether some of its parameters make a step.
    pub(super) fn has_grads(&self) -> Result<bool> {
        for twin in &self.twins {
            if grad(&twin.parameter.tensor)?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Begins a step. Returns the gradients, each after its place in a slot, which become the gradients of the twins.
    pub(super) fn begin(&mut self, slot: usize) -> Result<Vec<(Tensor, Tensor)>> {
        let mut pairs = Vec::new();
        for Twin { parameter, grads, is_stepped, .. } in &mut self.twins {
            let gradient = grad(&parameter.tensor)?;
            *is_stepped = gradient.is_some();
            pairs.extend(gradient.map(|gradient| (grads[slot].shallow_clone(), gradient)));
        }
        Ok(pairs)
    }

    fn stepped(&self) -> impl Iterator<Item = &Twin> {
        self.twins.iter().filter(|twin| twin.is_stepped)
    }

    /// Frees the memory of gradients that were copied.
    pub(super) fn drop_gradients(&self) -> Result {
        self.stepped().try_for_each(|twin| Ok(set_grad(&twin.parameter.tensor, None)?))
    }

    /// Gives the twins the gradients that were copied into a slot, or takes them away.
    pub(super) fn set_grads(&self, slot: Option<usize>) -> Result {
        self.stepped().try_for_each(|twin| Ok(set_grad(&twin.host, slot.map(|slot| &twin.grads[slot]))?))
    }

    /// The parameters that make a step, each before its twin.
    pub(super) fn sent(&self) -> Result<Vec<(Tensor, Tensor)>> {
        let pair = |twin: &Twin| Ok((twin.parameter.tensor.f_detach()?, twin.host.f_detach()?));
        self.stepped().map(pair).collect()
    }

    /// Notes that twins and parameters have the same values, once what was sent has arrived.
    pub(super) fn note_same(&mut self) {
        for Twin { parameter, version, .. } in &mut self.twins {
            *version = Some(parameter.tensor.internal_version());
        }
    }

    /// Parameters may have other values than twins.
    pub(super) fn note_change(&mut self) {
        self.twins.iter_mut().for_each(|twin| twin.version = None);
    }

    /// The twins whose parameters have changed, each before its parameter.
    pub(super) fn changed(&self) -> Vec<(Tensor, Tensor)> {
        let has_changed = |twin: &&Twin| twin.version != Some(twin.parameter.tensor.internal_version());
        let pair = |twin: &Twin| (twin.host.shallow_clone(), twin.parameter.tensor.detach());
        self.twins.iter().filter(has_changed).map(pair).collect()
    }
}
