//! The last layer of a language model and its loss on a GPU: a matrix product, then two passes over the logits. The
//! second pass overwrites the logits with their gradient.
#![allow(unsafe_code)]

use tch::{Device, Kind, Tensor};

use super::place::{Element, Source, launch};
use crate::autocast::autocast_kind;
use crate::cuda::{Argument, Grid};
use crate::error::TorchError;
use crate::function::autograd_function;

static SOURCE: Source = Source::new(&[include_str!("cross_entropy.cu")]);

/// Threads per block, as in the source.
const THREADS: u32 = 512;

/// The target classes of rows.
#[derive(Debug, Clone, Copy)]
pub struct RightClasses<'a> {
    /// The target class of each row, of kind Int64.
    pub classes: &'a Tensor,
    /// The number of classes; further rows of the weight are padding.
    pub valid: i64,
}

/// The sum of the cross-entropies of `states · weightᵀ`, with states of rows × size and a weight of classes × size.
/// Logits have the type of the product, and one backward consumes them. A target class out of range makes the loss NaN.
/// Returns `None` if the kernels do not support the tensors, so that libtorch is the fallback.
pub fn linear_cross_entropy_cuda(
    states: &Tensor,
    weight: &Tensor,
    right: RightClasses<'_>,
) -> Result<Option<Tensor>, TorchError> {
    let Some(head) = Head::of(states, weight, &right)? else { return Ok(None) };
    let kinds = [states.kind(), weight.kind()];
    let classes = right.classes.shallow_clone();
    let mut is_consumed = false;
    let outputs = autograd_function(
        &[states, weight],
        |cx, inputs| {
            let (states, weight) = (inputs[0].f_to_kind(head.kind)?, inputs[1].f_to_kind(head.kind)?);
            let logits = states.f_mm(&weight.f_tr()?)?;
            let (losses, logs) = head.losses(&logits, &classes)?;
            if cx.needs_input_grad(0) || cx.needs_input_grad(1) {
                for saved in [&states, &weight, &logits, &logs, &classes] {
                    cx.save(saved);
                }
            }
            Ok(vec![losses.f_sum(Kind::Float)?])
        },
        move |cx, grads| {
            let (Some(by_sum), [states, weight, logits, logs, classes]) = (&grads[0], cx.saved()) else {
                return Ok(vec![None, None]);
            };
            if std::mem::replace(&mut is_consumed, true) {
                return Err("the first backward has overwritten the logits; try a new forward".into());
            }
            head.gradients(logits, classes, [logs, &by_sum.f_to_kind(Kind::Float)?])?;
            let of_states = || logits.f_mm(weight)?.f_to_kind(kinds[0]);
            let of_weight = || logits.f_tr()?.f_mm(states)?.f_to_kind(kinds[1]);
            Ok(vec![
                cx.needs_input_grad(0).then(of_states).transpose()?,
                cx.needs_input_grad(1).then(of_weight).transpose()?,
            ])
        },
    )?;
    Ok(outputs.into_iter().next())
}

#[derive(Debug, Clone, Copy)]
struct Head {
    device: usize,
    element: Element,
    /// The type of the product.
    kind: Kind,
    rows: i64,
    count: i64,
    valid: i64,
}

impl Head {
    fn of(states: &Tensor, weight: &Tensor, right: &RightClasses<'_>) -> Result<Option<Self>, TorchError> {
        let Device::Cuda(device) = states.device() else { return Ok(None) };
        let kind = autocast_kind(states.device())?.unwrap_or(states.kind());
        let [rows, size] = states.size()[..] else { return Ok(None) };
        let Some(element) = Element::on(device, kind) else { return Ok(None) };
        let [count, of_weight] = weight.size()[..] else { return Ok(None) };
        let fits = rows > 0
            && rows < i64::from(i32::MAX)
            && size == of_weight
            && count % element.per_vector() == 0
            && (1..=count).contains(&right.valid)
            && weight.device() == states.device()
            && right.classes.device() == states.device()
            && right.classes.kind() == Kind::Int64
            && right.classes.size() == [rows]
            && right.classes.is_contiguous();
        Ok(fits.then_some(Self { device, element, kind, rows, count, valid: right.valid }))
    }

    fn floats(&self) -> Result<Tensor, TorchError> {
        Ok(Tensor::f_empty([self.rows], (Kind::Float, Device::Cuda(self.device)))?)
    }

    /// Each row's loss, and the logarithm of its sum of exponentials.
    fn losses(&self, logits: &Tensor, classes: &Tensor) -> Result<(Tensor, Tensor), TorchError> {
        let (losses, logs) = (self.floats()?, self.floats()?);
        self.launch("row_losses", &[logits.into(), classes.into(), (&losses).into(), (&logs).into()])?;
        Ok((losses, logs))
    }

    /// Overwrites the logits with their gradient.
    fn gradients(
        &self,
        logits: &Tensor,
        classes: &Tensor,
        [logs, by_sum]: [&Tensor; 2],
    ) -> Result<(), TorchError> {
        self.launch("row_gradients", &[logits.into(), classes.into(), logs.into(), by_sum.into()])
    }

    fn launch(&self, name: &str, tensors: &[Argument]) -> Result<(), TorchError> {
        let kernels = SOURCE.on(self.device, self.element)?;
        let grid = Grid { blocks: (self.rows as u32, 1), threads: THREADS, shared: 0 };
        let sizes = [(self.count as i32).into(), (self.valid as i32).into()];
        // SAFETY: the arguments are listed as in the source, for tensors whose shapes `of` has checked.
        unsafe { launch(&kernels, name, self.device, grid, &[tensors, &sizes].concat()) }
    }
}
