//! The same normalisation with statistics that stay on the GPU: the arithmetic of `moments` on tensors, so that the
//! host does not wait.
//!
//! ```text
//!   x ─▶ [count, means…, variances…] ─▶ all ranks' rows ─▶ count, mean and variance of the whole batch ─▶ as on the host
//! ```

use drumline_torch::is_recomputing;
use tch::{Device, Kind, Tensor};

use super::{Result, SyncBatchNorm, Whole, computing_kind};

/// The moments of all ranks' batches, in double precision.
struct Moments {
    /// One number; at least 1, so that an empty batch does not divide by zero.
    count: Tensor,
    mean: Tensor,
    variance: Tensor,
    /// 1, or 0 if no rank has a sample: then the running statistics do not change.
    has_samples: Tensor,
}

impl Moments {
    /// Combines the rows of all ranks.
    fn of_all(rows: &Tensor, channels: i64) -> Result<Self> {
        let counts = rows.f_narrow(1, 0, 1)?;
        let (means, variances) = (rows.f_narrow(1, 1, channels)?, rows.f_narrow(1, 1 + channels, channels)?);
        let sum = |values: Tensor| values.f_sum_dim_intlist(0i64, false, Kind::Double);
        let total = sum(counts.shallow_clone())?;
        let count = total.f_clamp_min(1.0)?;
        let mean = sum(counts.f_mul(&means)?)?.f_div(&count)?;
        let spread = means.f_sub(&mean)?.f_square()?.f_add(&variances)?;
        let variance = sum(counts.f_mul(&spread)?)?.f_div(&count)?;
        Ok(Self { has_samples: total.f_clamp_max(1.0)?, count, mean, variance })
    }

    /// The unbiased estimate of the variance.
    fn unbiased_variance(&self) -> Result<Tensor> {
        let others = self.count.f_sub_scalar(1.0)?.f_clamp_min(1.0)?;
        Ok(self.variance.f_mul(&self.count)?.f_div(&others)?)
    }
}

impl SyncBatchNorm {
    /// Normalises a batch in training by the moments of all ranks' batches, and updates the running statistics.
    pub(super) fn normalised_on_gpu(&self, x: &Tensor) -> Result<Tensor> {
        let kind = computing_kind(x);
        let (whole, variance) = {
            let _no_grad = tch::no_grad_guard();
            let rows = self.sync.gather_on_gpu(self.channels as usize, &self.statistics(x)?)?;
            let moments = Moments::of_all(&rows, self.channels)?;
            self.update_running(&moments)?;
            let invstd = moments.variance.f_add_scalar(self.config.eps)?.f_rsqrt()?.f_to_kind(kind)?;
            let (mean, count) = (moments.mean.f_to_kind(kind)?, moments.count.f_to_kind(kind)?);
            (Whole { sync: self.sync.clone(), mean, invstd, count }, moments.variance.f_to_kind(kind)?)
        };
        self.apply(x, whole, variance)
    }

    /// The statistics of this rank's batch.
    fn statistics(&self, x: &Tensor) -> Result<Tensor> {
        let (channels, options) = (self.channels, (Kind::Double, x.device()));
        let count = x.numel() as i64 / channels.max(1);
        if count == 0 {
            return Ok(Tensor::f_zeros([1 + 2 * channels], options)?);
        }
        let x = x.f_detach()?.f_to_kind(computing_kind(x))?;
        let (mean, variance) = x.f_batch_norm_update_stats(None::<&Tensor>, None, 0.0)?;
        let count = Tensor::f_full([1], count, options)?;
        Ok(Tensor::f_cat(&[count, mean.f_to_kind(Kind::Double)?, variance.f_to_kind(Kind::Double)?], 0)?)
    }

    fn update_running(&self, moments: &Moments) -> Result {
        if is_recomputing() {
            return Ok(());
        }
        let weight = moments.has_samples.f_mul_scalar(self.config.momentum)?;
        let batches = [
            (&self.running_mean, moments.mean.shallow_clone()),
            (&self.running_var, moments.unbiased_variance()?),
        ];
        for (running, batch) in batches {
            let step = batch.f_sub(running)?.f_mul(&weight)?.f_to_kind(running.kind())?;
            let _ = running.shallow_clone().f_add_(&step)?;
        }
        Ok(())
    }
}

impl Whole {
    /// The sums over all ranks, concatenated.
    pub(super) fn sums_on_gpu(&self, by_weight: &Tensor, by_bias: &Tensor) -> Result<Tensor> {
        debug_assert!(self.mean.device() != Device::Cpu, "the host computes this in `sums`");
        let mut sums = Tensor::f_cat(&[by_weight, by_bias], 0)?.f_to_kind(Kind::Double)?;
        self.sync.sum_on_gpu(self.mean.numel(), &mut sums)?;
        Ok(sums)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_equal_those_of_the_host() {
        let rows: [[f64; 5]; 3] =
            [[2.0, 1.0, -3.0, 0.5, 4.0], [0.0, 9.0, 9.0, 9.0, 9.0], [6.0, 2.0, 5.0, 1.5, 0.0]];
        let host = super::super::moments::Moments::of_all(&rows.concat(), 2);
        let here = Moments::of_all(&Tensor::from_slice2(&rows), 2).unwrap();
        let values = |tensor: &Tensor| Vec::<f64>::try_from(tensor.view([-1])).unwrap();
        assert_eq!(values(&here.count), [8.0]);
        for (here, host) in [
            (values(&here.mean), host.mean.clone()),
            (values(&here.variance), host.variance.clone()),
            (values(&here.unbiased_variance().unwrap()), host.unbiased_variance()),
        ] {
            assert!(here.iter().zip(&host).all(|(a, b)| (a - b).abs() < 1e-12), "{here:?} {host:?}");
        }
        assert_eq!(values(&here.has_samples), [1.0]);
    }

    #[test]
    fn without_samples_the_running_statistics_do_not_change() {
        let none = Moments::of_all(&Tensor::zeros([2, 5], (Kind::Double, Device::Cpu)), 2).unwrap();
        assert_eq!(none.has_samples.double_value(&[0]), 0.0);
        assert!(Vec::<f64>::try_from(&none.mean).unwrap().iter().all(|mean| *mean == 0.0));
    }
}
