//! Adafactor's step of parameters on a GPU, by operations of libtorch that never wait for it, so that a CUDA graph can have
//! them. Numbers that depend on the count of steps are computed on the device.

use tch::{Device, Kind, Tensor};

use super::super::trained::Trained;
use super::super::work::{self, Work};
use super::host::columns_of;
use super::{AdafactorOptions, StepSize, Sums};
use crate::error::TorchError;

/// A step of all parameters on a GPU.
pub(super) struct GpuStep<'a> {
    pub(super) trained: &'a Trained,
    pub(super) options: &'a AdafactorOptions,
    pub(super) gpu: Device,
    pub(super) found_inf: Option<&'a Tensor>,
}

/// A parameter in the middle of its step.
struct Begun {
    /// Its weights in f32.
    weights: Tensor,
    grad: Tensor,
    /// The number of the step: one f64.
    number: Tensor,
    /// The weight of this step in the running means.
    weight: Tensor,
}

impl GpuStep<'_> {
    /// Steps the parameters, and joins the collectives of other ranks' parameters.
    pub(super) fn run(&self, mut work: Vec<Work>) -> Result<(), TorchError> {
        let sums = Sums::zeros(self.trained.shapes());
        let place = (Kind::Double, self.gpu);
        let mut numbers = Tensor::f_zeros([sums.numbers.len() as i64], place)?;
        let of = |numbers: &Tensor, index: usize| {
            let (from, to) = (sums.begin[index] as i64, sums.begin[index + 1] as i64);
            numbers.f_narrow(0, from, to - from)
        };
        let mut begun = Vec::new();
        for work in &work {
            let one = self.begin(work)?;
            self.add_means(work, &one, &of(&numbers, work.index)?)?;
            begun.push(one);
        }
        self.trained.sum_over_ranks_on_gpu(&mut numbers)?;
        let mut squares = Tensor::f_zeros([self.trained.shapes().len() as i64], place)?;
        let mut directions = Vec::new();
        for (work, one) in work.iter().zip(&begun) {
            let direction = self.direction(work, one, &of(&numbers, work.index)?)?;
            squares.f_get(work.index as i64)?.f_copy_(&sum_of_squares(&direction)?)?;
            directions.push(direction);
        }
        self.trained.sum_over_ranks_on_gpu(&mut squares)?;
        for ((work, one), direction) in work.iter_mut().zip(&begun).zip(directions) {
            let weights = of(&numbers, work.index)?.f_get(-1)?;
            self.change(work, one, &direction, [&weights, &squares.f_get(work.index as i64)?])?;
        }
        work.iter().try_for_each(Work::mark_written)
    }

    /// Counts the step.
    fn begin(&self, work: &Work) -> Result<Begun, TorchError> {
        let number = work.kept[0].f_to_kind(Kind::Double)?.f_add_scalar(1.0)?;
        let weight = number.f_pow_tensor_scalar(self.options.beta2_decay)?.f_to_kind(Kind::Float)?;
        self.assign(&work.kept[0], &number)?;
        let factor = f64::from(work::grad_factor(self.options.maximize));
        let grad = work.grad.f_to_kind(Kind::Float)?.f_mul_scalar(factor)?;
        Ok(Begun { weights: work.whole_weights()?, grad, number, weight })
    }

    /// Updates the running means of this rank, and writes its sums.
    fn add_means(&self, work: &Work, one: &Begun, sums: &Tensor) -> Result<(), TorchError> {
        let squares = one.grad.f_square()?;
        let mean_of = |dim: i64| squares.f_mean_dim(&[dim][..], true, Kind::Float);
        match &work.kept[..] {
            [_, rows, columns] => {
                let rows_now = rows.f_lerp_tensor(&mean_of(-1)?, &one.weight)?;
                self.assign(rows, &rows_now)?;
                match columns_of(&work.whole) {
                    Some(num) => {
                        let found = squares.f_sum_dim_intlist(&[0i64][..], false, Kind::Double)?;
                        sums.f_narrow(0, 0, num as i64)?.f_copy_(&found)?;
                        sums.f_get(num as i64)?.f_copy_(&rows_now.f_sum(Kind::Double)?)?;
                    }
                    None => self.assign(columns, &columns.f_lerp_tensor(&mean_of(-2)?, &one.weight)?)?,
                }
            }
            kept => self.assign(&kept[1], &kept[1].f_lerp_tensor(&squares, &one.weight)?)?,
        }
        Ok(sums.f_get(-1)?.f_copy_(&sum_of_squares(&one.weights)?)?)
    }

    /// The direction of a parameter, from sums of all ranks.
    fn direction(&self, work: &Work, one: &Begun, sums: &Tensor) -> Result<Tensor, TorchError> {
        let least = self.options.eps.0;
        let variance = match &work.kept[..] {
            [_, rows, columns] => {
                let (columns, mean) = match columns_of(&work.whole) {
                    Some(num) => {
                        let num_rows = work.whole.first().map_or(1.0, |rows| *rows as f64);
                        let means = sums.f_div_scalar(num_rows)?;
                        let of_columns = means.f_narrow(0, 0, num as i64)?.f_to_kind(Kind::Float)?;
                        let now = columns.f_lerp_tensor(&of_columns, &one.weight)?;
                        self.assign(columns, &now)?;
                        let mean = means.f_get(num as i64)?.f_clamp_min(least)?.f_to_kind(Kind::Float)?;
                        (now.f_unsqueeze(0)?, mean)
                    }
                    None => {
                        let mean = rows.f_mean_dim(&[-2i64][..], true, Kind::Float)?.f_clamp_min(least)?;
                        (columns.shallow_clone(), mean)
                    }
                };
                rows.f_mul(&columns)?.f_div(&mean)?
            }
            kept => kept[1].shallow_clone(),
        };
        Ok(one.grad.f_div(&variance.f_clamp_min(f64::from((least * least) as f32))?.f_sqrt()?)?)
    }

    /// Changes the weights, whose squares and those of the directions have these sums.
    fn change(
        &self,
        work: &mut Work,
        one: &Begun,
        direction: &Tensor,
        [weights, directions]: [&Tensor; 2],
    ) -> Result<(), TorchError> {
        let AdafactorOptions { step_size, scale_parameter, eps, d, .. } = self.options;
        let lr = match &work.lr_at {
            Some(lr) => lr.shallow_clone(),
            None => one.number.f_full_like(work.lr)?,
        };
        let most = one.number.f_rsqrt()?;
        let rho = match step_size {
            StepSize::Capped => lr.f_minimum(&most)?,
            StepSize::Fixed => lr.shallow_clone(),
            StepSize::WarmUp => one.number.f_mul_scalar(1e-6)?.f_minimum(&most)?,
        };
        let numel = work.whole_numel();
        let root = |sum: &Tensor| sum.f_div_scalar(numel)?.f_sqrt();
        let least = root(directions)?.f_div_scalar(*d)?.f_clamp_min(1.0)?;
        let mut factor = rho.f_div(&least)?;
        if *scale_parameter {
            factor = factor.f_mul(&root(weights)?.f_clamp_min(eps.1)?)?;
        }
        let kept = lr.f_mul_scalar(-work.weight_decay)?.f_add_scalar(1.0)?;
        let new = one.weights.f_mul(&kept)?.f_sub(&direction.f_mul(&factor)?)?;
        let new = match self.is_kept()? {
            Some(is_kept) => one.weights.f_where_self(&is_kept, &new)?,
            None => new,
        };
        work.write_weights(&new)
    }

    /// Writes to a state tensor, unless the step is skipped.
    fn assign(&self, to: &Tensor, new: &Tensor) -> Result<(), TorchError> {
        let mut to = to.shallow_clone();
        let new = new.f_to_kind(to.kind())?;
        match self.is_kept()? {
            Some(is_kept) => to.f_copy_(&to.f_where_self(&is_kept, &new)?)?,
            None => to.f_copy_(&new)?,
        }
        Ok(())
    }

    /// Whether the step is skipped: one bool on the GPU.
    fn is_kept(&self) -> Result<Option<Tensor>, TorchError> {
        let is_kept = self.found_inf.map(|found_inf| found_inf.f_not_equal(0.0));
        Ok(is_kept.transpose()?)
    }
}

/// The sum of squares of a tensor's elements: one f64.
fn sum_of_squares(tensor: &Tensor) -> Result<Tensor, TorchError> {
    Ok(tensor.f_detach()?.f_norm_scalaropt_dtype(2.0, Kind::Double)?.f_square()?)
}

#[cfg(test)]
mod tests {
    use super::super::{Adafactor, slots};
    use super::*;
    use crate::{Named, Optimizer, set_grad};
    use tch::no_grad;

    fn numbers(size: &[i64], by: f64) -> Tensor {
        let numel: i64 = size.iter().product();
        ((Tensor::arange(numel, (Kind::Float, Device::Cpu)) + by) * 1.7).sin().view(size)
    }

    fn parameters() -> Vec<Named> {
        let sizes = [&[6, 5][..], &[7], &[3, 2, 4], &[2, 3, 2, 2]];
        let made = sizes.iter().enumerate().map(|(index, size)| Named {
            name: format!("p{index}"),
            tensor: numbers(size, index as f64).set_requires_grad(true),
        });
        made.collect()
    }

    /// The step that a GPU would make.
    fn step(optimizer: &mut Adafactor, found_inf: Option<&Tensor>) {
        let work = optimizer.trained.work(&[], &slots).unwrap().unwrap();
        let Adafactor { trained, options } = optimizer;
        let step = GpuStep { trained, options, gpu: Device::Cpu, found_inf };
        no_grad(|| step.run(work)).unwrap();
    }

    fn all(parameters: &[Named], optimizer: &Adafactor) -> Vec<Tensor> {
        let state = optimizer.state().tensors;
        let tensors = parameters.iter().chain(&state).map(|named| named.tensor.detach().copy());
        tensors.collect()
    }

    #[test]
    fn operations_make_the_steps_of_our_kernels() {
        let base = AdafactorOptions { weight_decay: 0.1, ..AdafactorOptions::default() };
        let fixed = AdafactorOptions {
            step_size: StepSize::Fixed,
            scale_parameter: false,
            maximize: true,
            ..base.clone()
        };
        let warm_up = AdafactorOptions { step_size: StepSize::WarmUp, d: 1.5, ..base.clone() };
        for options in [base, fixed, warm_up] {
            let [ours, others] = [(); 2].map(|()| parameters());
            let [mut kernels, mut operations] =
                [&ours, &others].map(|all| Adafactor::new(all.clone(), options.clone()).unwrap());
            for number in 0..4 {
                for (one, other) in ours.iter().zip(&others) {
                    let grad = numbers(&one.tensor.size(), 0.3 + f64::from(number));
                    set_grad(&one.tensor, Some(&grad)).unwrap();
                    set_grad(&other.tensor, Some(&grad)).unwrap();
                }
                kernels.step().unwrap();
                let found_inf = Tensor::from(0f32);
                step(&mut operations, (number % 2 == 0).then_some(&found_inf));
            }
            let (expected, found) = (all(&ours, &kernels), all(&others, &operations));
            assert_eq!(expected.len(), found.len());
            for (expected, found) in expected.iter().zip(&found) {
                assert!(expected.allclose(found, 1e-5, 1e-6, false), "{options:?}: {expected} {found}");
            }
            step(&mut operations, Some(&Tensor::from(1f32)));
            assert_eq!(all(&others, &operations), found, "a step that is skipped changes nothing");
        }
    }
}
