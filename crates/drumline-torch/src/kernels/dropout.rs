//! Dropout whose random bits are a function of a seed and the element's index.
//!
//! ```text
//!   seed: 64 bits of each sample, or one draw of libtorch's generator      element i: 16 bits of mix(seed, i) ─▶ kept or zeroed
//! ```
//! So backward needs no stored mask. The probability is rounded to a multiple of 1/65536, and the scale of kept
//! elements uses the rounded probability. In a scope of [`Masks`](crate::Masks) the seeds depend on the position alone.

mod part;

use tch::{Device, Kind, Tensor};

pub use part::{PartOf, dropout_part};

use super::cuda::{CudaMask, Dropped, drops_on};
use super::floats::{floats, floats_mut, for_instruction_sets, has_floats};
use super::random::mix;
use crate::error::TorchError;
use crate::function::{FunctionError, autograd_function};
use crate::masks::{Place, Position};

/// The number of 16-bit values.
const STEPS: f64 = 65536.0;
/// Elements whose random bits are made together: two for each 32-bit word.
const BLOCK: usize = 32;

/// How many elements are dropped.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rate {
    /// Elements whose random bits are below this are zeroed.
    pub(super) below: u32,
    /// The factor of the others.
    pub(super) scale: f32,
}

impl Rate {
    /// The probability `p`, at least 0 and less than 1.
    pub(super) fn of(p: f64) -> Result<Self, TorchError> {
        if !(0.0..1.0).contains(&p) {
            return Err(TorchError::value("the dropout probability", p, "at least 0 and less than 1"));
        }
        let below = (p * STEPS).round().min(STEPS - 1.0);
        Ok(Self { below: below as u32, scale: (STEPS / (STEPS - below)) as f32 })
    }
}

/// Dropout of one sample.
#[derive(Debug, Clone, Copy)]
struct Dropout {
    seed: [u32; 2],
    rate: Rate,
}

impl Dropout {
    /// The factors of the elements of a block.
    #[inline(always)]
    fn factors(&self, block: usize) -> [f32; BLOCK] {
        let Rate { below, scale } = self.rate;
        let mut factors = [0.0; BLOCK];
        let first = (block * (BLOCK / 2)) as u32;
        for lane in 0..BLOCK / 2 {
            let bits = mix(mix((first + lane as u32) ^ self.seed[0]).wrapping_add(self.seed[1]));
            factors[lane] = if bits & 0xffff < below { 0.0 } else { scale };
            factors[lane + BLOCK / 2] = if bits >> 16 < below { 0.0 } else { scale };
        }
        factors
    }
}

for_instruction_sets! {
    /// `out` = `base` + dropout of `xs`.
    fn drop_onto(out: &mut [f32], base: &[f32], xs: &[f32], how: Dropout) {
        let blocks = out.chunks_mut(BLOCK).zip(base.chunks(BLOCK)).zip(xs.chunks(BLOCK));
        for (block, ((out, base), xs)) in blocks.enumerate() {
            let factors = how.factors(block);
            for (((out, base), x), factor) in out.iter_mut().zip(base).zip(xs).zip(factors) {
                *out = base + x * factor;
            }
        }
    }
}

for_instruction_sets! {
    /// `out` = dropout of `xs`.
    fn drop_into(out: &mut [f32], xs: &[f32], how: Dropout) {
        for (block, (out, xs)) in out.chunks_mut(BLOCK).zip(xs.chunks(BLOCK)).enumerate() {
            let factors = how.factors(block);
            for ((out, x), factor) in out.iter_mut().zip(xs).zip(factors) {
                *out = x * factor;
            }
        }
    }
}

for_instruction_sets! {
    /// `out` = dropout of ReLU of `xs`.
    fn relu_drop_into(out: &mut [f32], xs: &[f32], how: Dropout) {
        for (block, (out, xs)) in out.chunks_mut(BLOCK).zip(xs.chunks(BLOCK)).enumerate() {
            let factors = how.factors(block);
            for ((out, x), factor) in out.iter_mut().zip(xs).zip(factors) {
                // NaN stays NaN.
                *out = if *x < 0.0 { 0.0 } else { x * factor };
            }
        }
    }
}

for_instruction_sets! {
    /// `out` = `grads` × `scale` where `ys` are positive, else 0.
    fn where_positive(out: &mut [f32], ys: &[f32], grads: &[f32], scale: f32) {
        for ((out, y), grad) in out.iter_mut().zip(ys).zip(grads) {
            *out = if *y > 0.0 { grad * scale } else { 0.0 };
        }
    }
}

/// The mask of a dropout.
#[derive(Debug)]
enum Mask {
    Host(HostMask),
    Cuda(CudaMask),
}

/// A mask in host memory: one seed for each sample.
#[derive(Debug, Clone)]
struct HostMask {
    seeds: Vec<[u32; 2]>,
    rate: Rate,
}

/// Whether our kernels drop elements of this tensor.
fn is_fused(xs: &Tensor) -> bool {
    has_floats(xs) || drops_on(xs.device(), xs.kind()) && Place::current().is_some()
}

impl Mask {
    /// The mask of the next dropout, of tensors of this size; `None` if libtorch draws it.
    fn draw(xs: &Tensor, rate: Rate) -> Result<Option<Self>, TorchError> {
        let Some(position) = Position::next() else {
            return if has_floats(xs) { Ok(Some(Self::Host(HostMask::random(rate)?))) } else { Ok(None) };
        };
        let seeds = position.seeds(&xs.size());
        let on_device = drops_on(xs.device(), xs.kind()).then(|| CudaMask::new(position, xs, rate)).flatten();
        Ok(Some(on_device.map_or(Self::Host(HostMask { seeds, rate }), Self::Cuda)))
    }

    fn shared(&self) -> Self {
        match self {
            Self::Host(mask) => Self::Host(mask.clone()),
            Self::Cuda(mask) => Self::Cuda(mask.shared()),
        }
    }

    fn run(&self, xs: &Tensor, how: Dropped<'_>) -> Result<Tensor, TorchError> {
        match self {
            Self::Cuda(mask) => mask.run(xs, how),
            Self::Host(mask) if has_floats(xs) => mask.run(&xs.f_contiguous()?, how),
            Self::Host(mask) => mask.times(xs, how),
        }
    }
}

impl HostMask {
    /// A mask by libtorch's CPU generator.
    fn random(rate: Rate) -> Result<Self, TorchError> {
        let seed = Tensor::f_empty([1], (Kind::Int64, Device::Cpu))?.f_random_from_(i64::MIN, None)?;
        let seed = seed.f_int64_value(&[0])?;
        Ok(Self { seeds: vec![[seed as u32, (seed >> 32) as u32]], rate })
    }

    fn run(&self, xs: &Tensor, how: Dropped<'_>) -> Result<Tensor, TorchError> {
        let other = match how {
            Dropped::Onto(other) | Dropped::WherePositive(other) => other.f_contiguous()?,
            Dropped::Alone | Dropped::OfRelu => xs.shallow_clone(),
        };
        let mut out = xs.f_empty_like()?;
        let (of_xs, of_other) = (floats(xs)?, floats(&other)?);
        let per_sample = (of_xs.len() / self.seeds.len().max(1)).max(1);
        let samples = floats_mut(&mut out)?.chunks_mut(per_sample).zip(of_xs.chunks(per_sample));
        for (((out, xs), other), seed) in samples.zip(of_other.chunks(per_sample)).zip(&self.seeds) {
            let one = Dropout { seed: *seed, rate: self.rate };
            match how {
                Dropped::Alone => drop_into(out, xs, one),
                Dropped::Onto(_) => drop_onto(out, other, xs, one),
                Dropped::OfRelu => relu_drop_into(out, xs, one),
                Dropped::WherePositive(_) => where_positive(out, other, xs, self.rate.scale),
            }
        }
        Ok(out)
    }

    /// For tensors that the loops do not support: the mask as a tensor.
    fn times(&self, xs: &Tensor, how: Dropped<'_>) -> Result<Tensor, TorchError> {
        let ones = Tensor::f_ones(xs.size(), (Kind::Float, Device::Cpu))?;
        let factors = self.run(&ones, Dropped::Alone)?.f_to_device(xs.device())?.f_to_kind(xs.kind())?;
        let dropped = xs.f_mul(&factors)?;
        Ok(match how {
            Dropped::Alone => dropped,
            Dropped::Onto(base) => base.f_add(&dropped)?,
            Dropped::OfRelu => dropped.f_relu()?,
            Dropped::WherePositive(ys) => xs
                .f_mul_scalar(f64::from(self.rate.scale))?
                .f_where_self(&ys.f_gt(0)?, &xs.f_zeros_like()?)?,
        })
    }
}

/// Dropout: elements are zeroed with probability `p`, and the others are scaled so that the mean does not change. In a
/// scope of [`Masks`](crate::Masks) the elements are chosen by position.
///
/// ```
/// use tch::{Device, Kind, Tensor};
///
/// let xs = Tensor::ones([100], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let out = drumline_torch::dropout(&xs, 0.5)?;
/// out.sum(Kind::Float).backward();
/// assert_eq!(xs.grad(), out.detach());
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn dropout(xs: &Tensor, p: f64) -> Result<Tensor, TorchError> {
    if p == 0.0 {
        return Ok(xs.shallow_clone());
    }
    let Some(mask) = Mask::draw(xs, Rate::of(p)?)? else { return Ok(xs.f_dropout(p, true)?) };
    let later = mask.shared();
    let outputs = autograd_function(
        &[xs],
        |_, inputs| Ok(vec![mask.run(inputs[0], Dropped::Alone)?]),
        move |_, grads| Ok(vec![dropped(&later, grads[0].as_ref())?]),
    );
    Ok(outputs?.swap_remove(0))
}

/// Dropout of the ReLU of `xs`.
pub fn relu_dropout(xs: &Tensor, p: f64) -> Result<Tensor, TorchError> {
    if p == 0.0 || !is_fused(xs) {
        return dropout(&xs.f_relu()?, p);
    }
    let Some(mask) = Mask::draw(xs, Rate::of(p)?)? else { return dropout(&xs.f_relu()?, p) };
    let later = mask.shared();
    let outputs = autograd_function(
        &[xs],
        |cx, inputs| {
            let out = mask.run(inputs[0], Dropped::OfRelu)?;
            cx.save(&out);
            Ok(vec![out])
        },
        move |cx, grads| {
            let of = |grad: &Tensor| later.run(grad, Dropped::WherePositive(&cx.saved()[0]));
            Ok(vec![grads[0].as_ref().map(of).transpose()?])
        },
    );
    Ok(outputs?.swap_remove(0))
}

/// `base` plus the dropout of `xs`.
pub fn sum_with_dropout(base: &Tensor, xs: &Tensor, p: f64) -> Result<Tensor, TorchError> {
    let is_like = base.size() == xs.size() && base.device() == xs.device();
    let is_like =
        is_like && (base.kind() == xs.kind() || base.kind() == Kind::Float && xs.device().is_cuda());
    if p == 0.0 || !is_like || !is_fused(xs) {
        return Ok(base.f_add(&dropout(xs, p)?)?);
    }
    let Some(mask) = Mask::draw(xs, Rate::of(p)?)? else { return Ok(base.f_add(&dropout(xs, p)?)?) };
    let (later, kind) = (mask.shared(), xs.kind());
    let outputs = autograd_function(
        &[base, xs],
        |_, inputs| Ok(vec![mask.run(inputs[1], Dropped::Onto(inputs[0]))?]),
        move |_, grads| {
            let short = grads[0].as_ref().map(|grad| grad.f_to_kind(kind)).transpose()?;
            Ok(vec![grads[0].as_ref().map(Tensor::shallow_clone), dropped(&later, short.as_ref())?])
        },
    );
    Ok(outputs?.swap_remove(0))
}

fn dropped(mask: &Mask, grad: Option<&Tensor>) -> Result<Option<Tensor>, FunctionError> {
    Ok(grad.map(|grad| mask.run(grad, Dropped::Alone)).transpose()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn the_right_share_is_dropped_and_the_mean_stays() {
        for p in [0.1, 0.5, 0.9] {
            let ones = Tensor::ones([300, 1001], FLOAT);
            let out = dropout(&ones, p).unwrap();
            let zeros = out.eq(0.0).to_kind(Kind::Double).mean(Kind::Double).double_value(&[]);
            let mean = out.mean(Kind::Double).double_value(&[]);
            let deviation = (p * (1.0 - p) / 300_300.0).sqrt();
            assert!((zeros - p).abs() < 6.0 * deviation, "{p}: {zeros}");
            assert!((mean - 1.0).abs() < 6.0 * deviation / (1.0 - p), "{p}: {mean}");
        }
    }

    #[test]
    fn neighbours_calls_and_rows_are_uncorrelated() {
        let ones = Tensor::ones([512, 512], FLOAT);
        let [a, b] = [0, 1].map(|_| dropout(&ones, 0.5).unwrap() - 1.0);
        let pairs = [
            (a.shallow_clone(), b),
            (a.narrow(1, 1, 511), a.narrow(1, 0, 511)),
            (a.narrow(1, 16, 496), a.narrow(1, 0, 496)),
            (a.narrow(0, 1, 511), a.narrow(0, 0, 511)),
        ];
        for (place, (left, right)) in pairs.iter().enumerate() {
            let correlation = (left * right).mean(Kind::Double).double_value(&[]);
            assert!(correlation.abs() < 6.0 / 511.0, "{place}: {correlation}");
        }
    }

    #[test]
    fn gradients_flow_through_kept_elements() {
        for size in [0i64, 1, 31, 32, 77] {
            let leaf = || Tensor::randn([size, 3], FLOAT).set_requires_grad(true);
            let (xs, base) = (leaf(), leaf());
            let out = dropout(&xs, 0.5).unwrap();
            (&out * 3.0).sum(Kind::Float).backward();
            let kept = out.ne(0.0).to_kind(Kind::Float);
            assert!(xs.grad().allclose(&(&kept * 6.0), 1e-6, 0.0, false));
            assert!(out.allclose(&(&kept * &xs * 2.0), 1e-6, 0.0, false));
            let xs = leaf();
            let out = relu_dropout(&xs, 0.5).unwrap();
            out.sum(Kind::Float).backward();
            let kept = out.gt(0.0).to_kind(Kind::Float);
            assert_eq!(xs.grad(), &kept * 2.0);
            assert_eq!(out.detach(), (&kept * &xs * 2.0).detach());
            let xs = leaf();
            let out = sum_with_dropout(&base, &xs, 0.5).unwrap();
            out.sum(Kind::Float).backward();
            assert_eq!(base.grad(), base.ones_like());
            assert!(out.allclose(&(&base + xs.grad() * &xs), 1e-6, 1e-6, false));
        }
    }

    #[test]
    fn a_seed_decides_the_zeros_and_invalid_probabilities_are_errors() {
        let xs = Tensor::ones([999], FLOAT);
        let seeded = || {
            tch::manual_seed(5);
            dropout(&xs, 0.3).unwrap()
        };
        // Tests on other threads may use the same generator in between.
        assert!((0..50).any(|_| seeded() == seeded()), "a seed decides which elements are dropped");
        assert_eq!(dropout(&xs, 0.0).unwrap(), xs);
        assert_eq!(dropout(&xs.to_kind(Kind::Double), 0.3).unwrap().kind(), Kind::Double);
        assert!(dropout(&xs, 1.0).unwrap_err().to_string().contains("expected at least 0 and less than 1"));
    }
}
