//! Cross-entropy with label smoothing, one row of logits at a time. It allocates nothing as large as the logits, except
//! their gradient.
//!
//! With C classes, smoothing s and target class t, a row's loss is log Σ exp(x) − (1 − s)·x[t] − s/C·Σ x. Its gradient
//! is softmax(x) − s/C, minus 1 − s at t.

use tch::{Device, Kind, Tensor};

use super::floats::{floats, floats_mut, for_instruction_sets, has_floats};
use crate::error::TorchError;
use crate::function::autograd_function;

/// With more threads libtorch's operation is faster: this one uses only the calling thread.
const MOST_THREADS: i32 = 4;

/// Sums are kept in this many lanes, so that they can be vectorised.
const LANES: usize = 16;

/// The target classes of rows.
#[derive(Debug, Clone, Copy)]
pub struct SmoothedLabels<'a> {
    /// The target class of each row, of kind Int64.
    pub classes: &'a Tensor,
    /// Rows of this class are ignored: PyTorch's `ignore_index`.
    pub ignored: Option<i64>,
    /// The label smoothing.
    pub smoothing: f64,
}

/// What backward needs of a row: its maximum logit, and 1 / Σ exp(x − max).
#[derive(Debug, Clone, Copy)]
struct Row {
    max: f32,
    inverse: f32,
}

/// The sum of the cross-entropies of logits of rows × classes.
///
/// ```
/// use drumline_torch::{SmoothedLabels, smoothed_cross_entropy};
/// use tch::{Device, Kind, Tensor};
///
/// let logits = Tensor::zeros([2, 10], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let classes = Tensor::from_slice(&[3i64, 7]);
/// let loss = smoothed_cross_entropy(&logits, SmoothedLabels { classes: &classes, ignored: None, smoothing: 0.1 })?;
/// assert!((loss.double_value(&[]) - 2.0 * 10f64.ln()).abs() < 1e-5);
/// loss.backward();
/// assert!((logits.grad().double_value(&[0, 3]) + 0.9 - 0.1 + 0.01).abs() < 1e-6);
/// # Ok::<(), drumline_torch::TorchError>(())
/// ```
pub fn smoothed_cross_entropy(logits: &Tensor, labels: SmoothedLabels<'_>) -> Result<Tensor, TorchError> {
    let SmoothedLabels { classes, ignored, smoothing } = labels;
    // No target has this class.
    let ignored = ignored.unwrap_or(i64::MIN);
    let size = logits.size();
    let is_plain =
        size.len() == 2 && size[1] > 0 && classes.size() == [size[0]] && classes.kind() == Kind::Int64;
    // libtorch's operation makes more passes, but uses all threads.
    let has_many_threads = tch::get_num_threads() > MOST_THREADS;
    if !is_plain || has_many_threads || !has_floats(logits) || classes.device() != Device::Cpu {
        let sum = tch::Reduction::Sum;
        return Ok(logits.f_cross_entropy_loss::<Tensor>(classes, None, sum, ignored, smoothing)?);
    }
    let (classes, num_classes) = (right_classes(classes, ignored, size[1])?, size[1] as usize);
    let smoothing = smoothing as f32;
    let logits = logits.f_contiguous()?;
    let (sum, rows) = losses(floats(&logits)?, &classes, num_classes, smoothing);
    let outputs = autograd_function(
        &[&logits],
        |cx, inputs| {
            cx.save(inputs[0]);
            Ok(vec![Tensor::from(sum as f32)])
        },
        move |cx, grads| {
            let Some(grad) = &grads[0] else { return Ok(vec![None]) };
            let (logits, by_sum) = (&cx.saved()[0], grad.f_double_value(&[])? as f32);
            let mut out = logits.f_empty_like()?;
            let slices = floats(logits)?
                .chunks_exact(num_classes)
                .zip(floats_mut(&mut out)?.chunks_exact_mut(num_classes));
            for ((logits, out), (class, row)) in slices.zip(classes.iter().zip(&rows)) {
                gradient(out, logits, *row, Scales { by_sum, even: smoothing / num_classes as f32 });
                match class {
                    Some(class) => out[*class] -= (1.0 - smoothing) * by_sum,
                    None => out.fill(0.0),
                }
            }
            Ok(vec![Some(out)])
        },
    );
    Ok(outputs?.swap_remove(0))
}

/// `None` for rows that are ignored.
fn right_classes(classes: &Tensor, ignored: i64, count: i64) -> Result<Vec<Option<usize>>, TorchError> {
    let classes = Vec::<i64>::try_from(classes)?;
    let checked = |class: i64| match class {
        class if class == ignored => Ok(None),
        class if (0..count).contains(&class) => Ok(Some(class as usize)),
        class => Err(TorchError::value("a target class", class, format!("0 to {}", count - 1))),
    };
    classes.into_iter().map(checked).collect()
}

/// The sum of all rows' losses, and what backward needs of each row.
fn losses(logits: &[f32], classes: &[Option<usize>], num_classes: usize, smoothing: f32) -> (f64, Vec<Row>) {
    let (mut total, smoothing) = (0.0, f64::from(smoothing));
    let row = |(logits, class): (&[f32], &Option<usize>)| {
        let Sums { max, exponentials, plain } = sums(logits);
        if let Some(class) = class {
            // Without smoothing, logits of minus infinity must not make the sum NaN.
            let even = if smoothing == 0.0 { 0.0 } else { smoothing / num_classes as f64 * plain };
            let right = (1.0 - smoothing) * f64::from(logits[*class]);
            total += f64::from(max) + exponentials.ln() - right - even;
        }
        Row { max, inverse: (1.0 / exponentials) as f32 }
    };
    let rows = logits.chunks_exact(num_classes).zip(classes).map(row).collect();
    (total, rows)
}

/// Sums over a row.
struct Sums {
    max: f32,
    /// Of exp(x − max).
    exponentials: f64,
    /// Of x.
    plain: f64,
}

for_instruction_sets! {
    fn sums(logits: &[f32]) -> Sums {
        let (blocks, rest) = logits.as_chunks::<LANES>();
        let mut most = [f32::NEG_INFINITY; LANES];
        for block in blocks {
            for (most, x) in most.iter_mut().zip(block) {
                *most = if *x > *most { *x } else { *most };
            }
        }
        let max = most.iter().chain(rest).copied().fold(f32::NEG_INFINITY, f32::max);
        let (mut exponentials, mut plain) = ([0f32; LANES], [0f32; LANES]);
        for block in blocks {
            for lane in 0..LANES {
                exponentials[lane] += exp(block[lane] - max);
                plain[lane] += block[lane];
            }
        }
        let sum = |lanes: [f32; LANES], rest: f64| lanes.iter().map(|lane| f64::from(*lane)).sum::<f64>() + rest;
        let exponentials = sum(exponentials, rest.iter().map(|x| f64::from(exp(x - max))).sum());
        Sums { max, exponentials, plain: sum(plain, rest.iter().map(|x| f64::from(*x)).sum()) }
    }
}

/// The factors of a gradient.
#[derive(Clone, Copy)]
struct Scales {
    by_sum: f32,
    /// The share of each class in the smoothed label.
    even: f32,
}

for_instruction_sets! {
    fn gradient(out: &mut [f32], logits: &[f32], row: Row, scales: Scales) {
        let (inverse, even) = (row.inverse * scales.by_sum, scales.even * scales.by_sum);
        for (out, x) in out.iter_mut().zip(logits) {
            *out = exp(x - row.max) * inverse - even;
        }
    }
}

/// exp(x) for x ≤ 0, with a relative error of 2e-7; 0 below -87. With x = n·ln 2 + r it is 2ⁿ times a polynomial in r.
#[inline(always)]
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts: n times the first is exact.
    const LN_2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
    let clamped = if x < -87.0 { -87.0 } else { x };
    // Adding and subtracting 1.5 · 2²³ rounds to an integer.
    const ROUND: f32 = 12_582_912.0;
    let n = (clamped * LOG2_E + ROUND) - ROUND;
    let r = (clamped - n * LN_2[0]) - n * LN_2[1];
    let mut y = 1.987_569_2e-4;
    for coefficient in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_66, 0.5] {
        y = y * r + coefficient;
    }
    let y = y * r * r + r + 1.0;
    let scaled = y * f32::from_bits(((n as i32 + 127) << 23) as u32);
    if x < -87.0 { 0.0 } else { scaled }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn exp_equals_that_of_f64() {
        for step in 0..200_000 {
            let x = -step as f32 * 87.0 / 200_000.0;
            let expected = f64::from(x).exp();
            assert!((f64::from(exp(x)) - expected).abs() <= 2.5e-7 * expected, "{x}: {} {expected}", exp(x));
        }
        assert_eq!([exp(0.0), exp(-100.0), exp(f32::NEG_INFINITY)], [1.0, 0.0, 0.0]);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn loss_and_gradient_equal_libtorchs() {
        for (rows, classes, ignored, smoothing) in [
            (1, 1, None, 0.1),
            (3, 2, None, 0.0),
            (7, 33, Some(0), 0.1),
            (5, 1000, Some(3), 0.2),
            (0, 4, None, 0.1),
        ] {
            let logits = (Tensor::randn([rows, classes], FLOAT) * 5.0).set_requires_grad(true);
            let right = Tensor::randint(classes, [rows], (Kind::Int64, Device::Cpu));
            let labels = SmoothedLabels { classes: &right, ignored, smoothing };
            let ours = smoothed_cross_entropy(&logits, labels).unwrap();
            let doubles = logits.detach().to_kind(Kind::Double).set_requires_grad(true);
            let sum = tch::Reduction::Sum;
            let expected = doubles.cross_entropy_loss::<Tensor>(
                &right,
                None,
                sum,
                ignored.unwrap_or(i64::MIN),
                smoothing,
            );
            let (value, wanted) = (ours.double_value(&[]), expected.double_value(&[]));
            assert!(
                (value - wanted).abs() <= 1e-6 * wanted.abs().max(1.0),
                "{rows} × {classes}: {value} {wanted}"
            );
            (ours * 3.0).backward();
            (expected * 3.0).backward();
            assert!(logits.grad().to_kind(Kind::Double).allclose(&doubles.grad(), 1e-5, 1e-6, false));
        }
    }

    #[test]
    fn nan_stays_nan_and_minus_infinity_has_no_weight() {
        let classes = Tensor::from_slice(&[1i64]);
        let loss = |logits: &[f32]| {
            let logits = Tensor::from_slice(logits).view([1, -1]);
            let labels = SmoothedLabels { classes: &classes, ignored: None, smoothing: 0.0 };
            smoothed_cross_entropy(&logits, labels).unwrap().double_value(&[])
        };
        assert!(loss(&[f32::NAN, 1.0, 2.0]).is_nan());
        assert!((loss(&[f32::NEG_INFINITY, 1.0, 1.0]) - 2f64.ln()).abs() < 1e-6);
    }

    #[test]
    fn a_target_class_out_of_range_is_an_error() {
        let logits = Tensor::zeros([2, 4], FLOAT);
        let classes = Tensor::from_slice(&[1i64, 4]);
        let labels = SmoothedLabels { classes: &classes, ignored: None, smoothing: 0.1 };
        let error = smoothed_cross_entropy(&logits, labels).unwrap_err().to_string();
        assert!(error.ends_with("a target class is 4; expected 0 to 3"), "{error}");
    }
}
