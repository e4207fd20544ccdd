//! Cross-entropy of logits whose classes are cut: no rank ever has all logits of a row.
//!
//! With C classes, smoothing s and target class t, a row's loss is log Σ exp(x) − (1 − s)·x[t] − s/C·Σ x, where C and the
//! sums are of all ranks:
//!
//! ```text
//!   own max ─▶ all-reduce MAX ─▶ m      own Σ exp(x − m), x[t] − m or 0, Σ (x − m) ─▶ all-reduce SUM ─▶ loss of the row
//! ```
//! Two collectives, whatever the smoothing. Backward needs none: softmax(x) − s/C, minus 1 − s at the target if it is
//! here.

use std::ops::Range;

use drumline_comm::{ReduceOp, call_site};
use drumline_torch::{TorchError, autograd_function};
use tch::{Kind, Tensor};

use super::ranks::{Site, TensorParallel};
use super::value::{Features, Invariant, Sharded, TpTensor};
use super::within::Within;
use crate::error::ParallelError;

/// The target classes of rows, which all ranks have.
#[derive(Debug, Clone, Copy)]
pub struct VocabLabels<'a> {
    /// The class of each row, of kind Int64.
    pub classes: &'a Tensor,
    /// The number of classes, if the last ones of the logits are padding.
    pub num_classes: Option<i64>,
    /// Rows of this class are ignored: PyTorch's `ignore_index`.
    pub ignored: Option<i64>,
    /// The label smoothing.
    pub smoothing: f64,
}

/// The sum of the cross-entropies of logits of rows × classes.
///
/// ```
/// use drumline_comm::LocalGroup;
/// use drumline_parallel::tensor::{Features, Sharded, TensorParallel, TpTensor, VocabLabels, vocab_cross_entropy};
/// use tch::{Device, Kind, Tensor};
///
/// LocalGroup::run(2, |group| {
///     let tp = TensorParallel::new(&group);
///     // 5 classes: 3 on rank 0, 2 on rank 1.
///     let own = Tensor::zeros([4, 3 - group.rank() as i64], (Kind::Float, Device::Cpu));
///     let logits = TpTensor::<Sharded<Features>>::sharded(own, 5, &tp).expect("3 and 2 of 5");
///     let classes = Tensor::from_slice(&[0i64, 4, 2, 3]);
///     let labels = VocabLabels { classes: &classes, num_classes: None, ignored: None, smoothing: 0.1 };
///     let loss = vocab_cross_entropy(&logits, labels).expect("both ranks call").into_tensor();
///     assert!((loss.double_value(&[]) - 4.0 * 5f64.ln()).abs() < 1e-5);
///     Ok(())
/// })?;
/// # Ok::<(), drumline_comm::CommError>(())
/// ```
#[track_caller]
pub fn vocab_cross_entropy(
    logits: &TpTensor<Sharded<Features>>,
    labels: VocabLabels<'_>,
) -> Result<TpTensor<Invariant>, ParallelError> {
    let (tp, site) = (&logits.tp, call_site());
    let rows = Rows::new(logits, labels, site)?;
    let outputs = autograd_function(
        &[&logits.local],
        |cx, inputs| {
            let Sums { loss, probs } = rows.sums(inputs[0])?;
            cx.save(&probs);
            Ok(vec![loss])
        },
        {
            let rows = rows.clone();
            move |cx, grads| {
                let Some(by_sum) = &grads[0] else { return Ok(vec![None]) };
                Ok(vec![Some(rows.gradient(&cx.saved()[0], by_sum)?)])
            }
        },
    );
    Ok(TpTensor::invariant(outputs?.swap_remove(0), tp))
}

/// What is known of the rows beside their logits.
struct Rows {
    tp: TensorParallel,
    site: Site,
    /// For each row whether it counts, as 1 or 0.
    counts: Tensor,
    /// For each row the column of its target, which is 0 if it is not here.
    columns: Tensor,
    /// For each row whether its target is here, as 1 or 0.
    is_here: Tensor,
    /// The columns of this rank.
    columns_here: i64,
    /// Those of them that are classes.
    valid: i64,
    num_classes: i64,
    smoothing: f64,
    kind: Kind,
}

/// The loss of all rows, and what backward needs.
struct Sums {
    loss: Tensor,
    probs: Tensor,
}

impl Clone for Rows {
    fn clone(&self) -> Self {
        Self {
            tp: self.tp.clone(),
            counts: self.counts.shallow_clone(),
            columns: self.columns.shallow_clone(),
            is_here: self.is_here.shallow_clone(),
            ..*self
        }
    }
}

impl Rows {
    fn new(
        logits: &TpTensor<Sharded<Features>>,
        labels: VocabLabels<'_>,
        site: Site,
    ) -> Result<Self, ParallelError> {
        let VocabLabels { classes, num_classes, ignored, smoothing } = labels;
        let whole = logits.whole_len();
        let num_classes = num_classes.unwrap_or(whole);
        let Range { start, end } = logits.cut().range(logits.tp.rank());
        let kind = if logits.local.kind() == Kind::Double { Kind::Double } else { Kind::Float };
        let size = logits.local.size();
        let is_plain = size.len() == 2 && classes.size() == [size[0]] && classes.kind() == Kind::Int64;
        if !is_plain || !(1..=whole).contains(&num_classes) {
            let got = format!("{size:?} and {:?}, with {num_classes} classes", classes.size());
            let expected = format!("rows × classes and rows, with 1 to {whole} classes");
            return Err(ParallelError::value("the size of logits and targets", got, expected));
        }
        let counts = classes.f_ne(ignored.unwrap_or(i64::MIN))?;
        // A wrong target that is not found, on a GPU, has the loss of none.
        let advice = "; try labels of these classes, or `ignored`";
        Within { what: "a target class", len: num_classes, advice }.check(classes, Some(&counts))?;
        let (columns_here, end) = (end - start, end.min(num_classes));
        let is_here = classes.f_ge(start)?.f_logical_and(&classes.f_lt(end)?)?.f_logical_and(&counts)?;
        let columns = classes.f_sub_scalar(start)?.f_mul(&is_here.f_to_kind(Kind::Int64)?)?.f_unsqueeze(1)?;
        Ok(Self {
            tp: logits.tp.clone(),
            site,
            counts: counts.f_to_kind(kind)?,
            columns,
            is_here: is_here.f_to_kind(kind)?,
            columns_here,
            valid: (end - start).max(0),
            num_classes,
            smoothing,
            kind,
        })
    }

    fn sums(&self, logits: &Tensor) -> Result<Sums, TorchError> {
        let xs = logits.f_narrow(1, 0, self.valid)?.f_to_kind(self.kind)?;
        // Of a rank without classes the least number, and finite if all logits of a row are minus infinity.
        let least = if self.kind == Kind::Double { f64::MIN } else { f64::from(f32::MIN) };
        let own_max = match self.valid {
            0 => Tensor::f_full([xs.size()[0]], least, (self.kind, xs.device()))?,
            _ => xs.f_amax(1, false)?.f_clamp_min(least)?,
        };
        let max = self.tp.reduced(&own_max, ReduceOp::Max, self.site)?;
        let shifted = xs.f_sub(&max.f_unsqueeze(1)?)?;
        let right = match self.valid {
            0 => self.is_here.shallow_clone(),
            // Not by a product with 0, which is NaN for minus infinity.
            _ => shifted
                .f_gather(1, &self.columns, false)?
                .f_squeeze_dim(1)?
                .f_masked_fill(&self.is_here.f_eq(0)?, 0.0)?,
        };
        let even = if self.smoothing == 0.0 {
            right.f_zeros_like()?
        } else {
            shifted.f_sum_dim_intlist(1, false, self.kind)?
        };
        let mut probs = shifted.f_exp()?;
        let exponentials = probs.f_sum_dim_intlist(1, false, self.kind)?;
        let packed = Tensor::f_stack(&[&exponentials, &right, &even], 0)?;
        let packed = self.tp.summed(&packed, self.site)?;
        let [exponentials, right, even] = [0, 1, 2].map(|row| packed.f_get(row));
        let (exponentials, right, even) = (exponentials?, right?, even?);
        let loss = exponentials
            .f_log()?
            .f_sub(&right.f_mul_scalar(1.0 - self.smoothing)?)?
            .f_sub(&even.f_mul_scalar(self.smoothing / self.num_classes as f64)?)?;
        let loss = loss.f_where_self(&self.counts.f_ne(0)?, &loss.f_zeros_like()?)?.f_sum(self.kind)?;
        probs = probs.f_div_(&exponentials.f_unsqueeze(1)?)?;
        Ok(Sums { loss, probs })
    }

    /// The gradient of the logits.
    fn gradient(&self, probs: &Tensor, by_sum: &Tensor) -> Result<Tensor, TorchError> {
        let mut grad = probs.f_sub_scalar(self.smoothing / self.num_classes as f64)?;
        if self.valid > 0 {
            let less = self.is_here.f_mul_scalar(self.smoothing - 1.0)?.f_unsqueeze(1)?;
            grad = grad.f_scatter_add_(1, &self.columns, &less)?;
        }
        // Not by a product with 0: a row without a finite logit has probabilities that are NaN.
        let ignored = self.counts.f_eq(0)?.f_unsqueeze(1)?;
        let grad = grad.f_mul_(&by_sum.f_to_kind(self.kind)?)?.f_masked_fill_(&ignored, 0.0)?;
        // Padding has no gradient.
        let padding = self.columns_here - self.valid;
        Ok(if padding > 0 { grad.f_constant_pad_nd([0, padding])? } else { grad })
    }
}
