//! The state of PowerSGD for a bucket, and one step with it.
//!
//! ```text
//!   first    | gradients in full, one after the other | P of each matrix |      reduced in one call
//!   second   | Q of each matrix |                                               reduced in one call
//! ```
//! Both are in the symmetric heap, with P and Q in column-major order: in row-major order products of four columns take
//! ten times as long.

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::{HeapTensor, TorchError};
use tch::Tensor;

use super::PowerSgdOptions;
use crate::ddp::{BucketShape, GradBucket};
use crate::hooks::normal::{Normal, Seeds};
use crate::hooks::orthogonal::{orthogonalize, wide};

/// One gradient as a matrix.
#[derive(Debug)]
struct Matrix {
    /// The index of the gradient in the bucket.
    gradient: usize,
    /// Rows and columns.
    sizes: [i64; 2],
    p: Tensor,
    q: Tensor,
    /// The error of this rank's compressed gradients so far.
    error: Option<Tensor>,
}

#[derive(Debug)]
pub(super) struct Memory {
    pub(super) shape: BucketShape,
    matrices: Vec<Matrix>,
    /// Gradients that are not compressed, and their places in `first`.
    full: Vec<(usize, Tensor)>,
    first: HeapTensor,
    second: HeapTensor,
}

impl Memory {
    /// All ranks of the group call it together.
    pub(super) fn new(
        bucket: &GradBucket,
        group: &ProcessGroup,
        options: &PowerSgdOptions,
    ) -> Result<Self, TorchError> {
        let ranks: Vec<Option<i64>> =
            bucket.gradients.iter().map(|gradient| options.rank_for(&gradient.size())).collect();
        let (mut in_first, mut in_second) = (0, 0);
        for (gradient, rank) in bucket.gradients.iter().zip(&ranks) {
            let [rows, columns] = matrix_sizes(gradient);
            in_first += rank.map_or(rows * columns, |rank| rows * rank);
            in_second += rank.map_or(0, |rank| columns * rank);
        }
        let heap = |len: i64| HeapTensor::zeros_on(group, bucket.device(), bucket.kind(), len as usize);
        let (first, second) = (heap(in_first)?, heap(in_second)?);
        let mut memory =
            Self { shape: bucket.shape(), matrices: Vec::new(), full: Vec::new(), first, second };
        memory.lay_out(bucket, &ranks, options)?;
        Ok(memory)
    }

    fn lay_out(
        &mut self,
        bucket: &GradBucket,
        ranks: &[Option<i64>],
        options: &PowerSgdOptions,
    ) -> Result<(), TorchError> {
        let (mut at_first, mut at_second) = (0, 0);
        let gradients = || bucket.gradients.iter().zip(ranks).enumerate();
        for (index, (gradient, _)) in gradients().filter(|(_, (_, rank))| rank.is_none()) {
            let place = take(self.first.tensor(), &mut at_first, &gradient.size())?;
            self.full.push((index, place));
        }
        for (gradient, (tensor, rank)) in gradients() {
            let Some(rank) = *rank else { continue };
            let sizes = matrix_sizes(tensor);
            let p = take(self.first.tensor(), &mut at_first, &[rank, sizes[0]])?.f_tr()?;
            let q = take(self.second.tensor(), &mut at_second, &[rank, sizes[1]])?.f_tr()?;
            let error =
                options.use_error_feedback.then(|| Tensor::zeros(sizes, (tensor.kind(), tensor.device())));
            self.matrices.push(Matrix { gradient, sizes, p, q, error });
        }
        Ok(())
    }

    /// Fills all Q with random numbers.
    pub(super) fn randomize(&mut self, normal: &mut Normal) -> Result<(), TorchError> {
        self.matrices.iter().try_for_each(|matrix| fill(&matrix.q, normal))
    }

    /// Fills columns of Q with random numbers if the last step left zeros or NaN in them. All ranks have the same Q, so
    /// all do the same.
    pub(super) fn replace_zero_columns(&mut self, seeds: &mut Seeds) -> Result<(), TorchError> {
        for Matrix { q, .. } in &self.matrices {
            let squares = q.f_to_kind(wide(q.kind()))?.f_square()?.f_sum_dim_intlist(0, false, None)?;
            let lengths: Vec<f64> = squares.f_to_kind(tch::Kind::Double)?.try_into()?;
            for (column, length) in lengths.iter().enumerate() {
                if *length == 0.0 || !length.is_finite() {
                    fill(&q.f_narrow(1, column as i64, 1)?, &mut Normal::new(seeds.next()))?;
                }
            }
        }
        Ok(())
    }

    /// One step; returns how many bytes were reduced.
    pub(super) fn reduce(
        &mut self,
        bucket: &GradBucket,
        group: &ProcessGroup,
        options: &PowerSgdOptions,
    ) -> Result<usize, TorchError> {
        let epsilon = options.orthogonalization_epsilon;
        let inputs =
            self.matrices.iter().map(|matrix| matrix.input(bucket)).collect::<Result<Vec<_>, _>>()?;
        for (matrix, input) in self.matrices.iter().zip(&inputs) {
            orthogonalize(&matrix.q, epsilon)?;
            let _ = input.f_mm_out(&matrix.p, &matrix.q)?;
        }
        for (gradient, place) in &self.full {
            place.shallow_clone().f_copy_(&bucket.gradients[*gradient])?;
        }
        let mut bytes = reduce_all(&self.first, group)?;
        for (gradient, place) in &self.full {
            bucket.gradients[*gradient].shallow_clone().f_copy_(place)?;
        }
        for (matrix, input) in self.matrices.iter().zip(&inputs) {
            orthogonalize(&matrix.p, epsilon)?;
            let _ = matrix.p.f_tr()?.f_mm_out(&matrix.q.f_tr()?, input)?;
        }
        bytes += reduce_all(&self.second, group)?;
        self.matrices.iter_mut().try_for_each(|matrix| matrix.output(bucket))?;
        Ok(bytes)
    }
}

impl Matrix {
    /// The gradient plus the error of earlier ones. With error feedback it is in the memory of the error.
    fn input(&self, bucket: &GradBucket) -> Result<Tensor, TorchError> {
        let gradient = bucket.gradients[self.gradient].f_reshape(self.sizes)?;
        Ok(match &self.error {
            Some(error) => error.shallow_clone().f_add_(&gradient)?,
            None => gradient,
        })
    }

    /// Replaces the gradient by P·Qᵀ, and keeps the difference to the input.
    fn output(&mut self, bucket: &GradBucket) -> Result<(), TorchError> {
        let approximation = self.product(&bucket.gradients[self.gradient])?;
        let Some(error) = &mut self.error else { return Ok(()) };
        // A step with NaN or infinite gradients resets the error.
        let is_finite = self.q.f_isfinite()?.f_all()?.f_int64_value(&[])? != 0;
        let _ = if is_finite { error.f_sub_(&approximation)? } else { error.f_zero_()? };
        Ok(())
    }

    fn product(&self, gradient: &Tensor) -> Result<Tensor, TorchError> {
        let q = self.q.f_tr()?;
        if gradient.is_contiguous() {
            return Ok(self.p.f_mm_out(&gradient.f_view(self.sizes)?, &q)?);
        }
        let product = self.p.f_mm(&q)?;
        gradient.shallow_clone().f_copy_(&product.f_view_as(gradient)?)?;
        Ok(product)
    }
}

/// Rows and columns of a gradient as a matrix: dim 0, and all others together.
fn matrix_sizes(gradient: &Tensor) -> [i64; 2] {
    let sizes = gradient.size();
    [sizes.first().copied().unwrap_or(1), sizes.iter().skip(1).product()]
}

/// The next elements of `flat` as a tensor.
fn take(flat: &Tensor, at: &mut i64, sizes: &[i64]) -> Result<Tensor, TorchError> {
    let numel = sizes.iter().product::<i64>();
    let place = flat.f_narrow(0, *at, numel)?.f_view(sizes)?;
    *at += numel;
    Ok(place)
}

fn fill(tensor: &Tensor, normal: &mut Normal) -> Result<(), TorchError> {
    let values = Tensor::f_from_slice(&normal.draw(tensor.numel()))?;
    tensor.shallow_clone().f_copy_(&values.f_view_as(tensor)?)?;
    Ok(())
}

fn reduce_all(flat: &HeapTensor, group: &ProcessGroup) -> Result<usize, TorchError> {
    let len = flat.tensor().numel();
    flat.all_reduce(group, 0..len, ReduceOp::Avg)?;
    Ok(len * flat.kind().elt_size_in_bytes())
}
