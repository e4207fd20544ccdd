//! The kernel against the rule in f64, and its kinds of weights, gradients and moments against each other.

use half::bf16;

use super::*;
use crate::kernels::random::Draw;

const STEPS: u64 = 20;

fn numbers(num: usize, seed: usize) -> Vec<f32> {
    let number = |nth: usize| ((nth * 7 + seed * 13) as f32 * 0.731).sin() * 10f32.powi((nth % 5) as i32 - 3);
    (0..num).map(number).collect()
}

fn rounded(numbers: &[f32]) -> Vec<bf16> {
    numbers.iter().map(|number| bf16::from_f32(*number)).collect()
}

fn step(step: u64, decay: WeightDecay) -> AdamStep {
    AdamStep { lr: 0.01, betas: (0.9, 0.99), eps: 1e-8, weight_decay: 0.1, decay, step, grad_factor: -0.5 }
}

/// Weights and moments in f64.
fn reference(num: usize, decay: WeightDecay) -> [Vec<f64>; 3] {
    let wide = |numbers: Vec<f32>| numbers.into_iter().map(f64::from).collect::<Vec<_>>();
    let (mut w, mut m, mut v) = (wide(numbers(num, 0)), vec![0.0; num], vec![0.0; num]);
    for at in 1..=STEPS {
        let AdamStep { lr, betas: (b1, b2), eps, weight_decay, .. } = step(at, decay);
        for (nth, g) in numbers(num, at as usize).into_iter().enumerate() {
            let mut g = f64::from(g) * -0.5;
            if decay == WeightDecay::L2 {
                g += weight_decay * w[nth];
            } else {
                w[nth] *= 1.0 - lr * weight_decay;
            }
            m[nth] = b1 * m[nth] + (1.0 - b1) * g;
            v[nth] = b2 * v[nth] + (1.0 - b2) * g * g;
            let (m, v) = (m[nth] / (1.0 - b1.powf(at as f64)), v[nth] / (1.0 - b2.powf(at as f64)));
            w[nth] -= lr * m / (v.sqrt() + eps);
        }
    }
    [w, m, v]
}

#[test]
fn steps_in_f32_follow_the_rule() {
    for decay in [WeightDecay::L2, WeightDecay::Decoupled] {
        for num in [0, 1, 255, 256, 257, 1000] {
            let (mut w, mut m, mut v) = (numbers(num, 0), vec![0.0; num], vec![0.0; num]);
            for at in 1..=STEPS {
                AdamSlices {
                    weights: WeightSlices::F32(&mut w),
                    grads: GradSlices::F32(&numbers(num, at as usize)),
                    moments: MomentSlices::F32 { exp_avg: &mut m, exp_avg_sq: &mut v },
                }
                .step(&step(at, decay))
                .unwrap();
            }
            for (found, expected) in [w, m, v].iter().zip(reference(num, decay)) {
                for (found, expected) in found.iter().zip(expected) {
                    let error = (f64::from(*found) - expected).abs();
                    assert!(error <= 2e-6 * expected.abs().max(0.05), "{decay:?}: {found} {expected}");
                }
            }
        }
    }
}

/// Weights with special values among them, and gradients that are rounded to bf16.
fn special(num: usize) -> Vec<f32> {
    let mut all = numbers(num, 0);
    let special = [
        0.0,
        -0.0,
        f32::MAX,
        -f32::MAX,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-45,
        f32::MIN_POSITIVE,
    ];
    all[..special.len()].copy_from_slice(&special);
    all
}

#[test]
fn split_weights_have_the_bits_of_copied_ones_after_each_step() {
    let num = 1003;
    let mut copy = special(num);
    let mut rounded_copy = rounded(&copy);
    let halves = copy.iter().map(|number| super::super::halves::split(*number));
    let (mut high, mut low): (Vec<_>, Vec<_>) = halves.unzip();
    let (mut m, mut v) = (vec![0.0; num], vec![0.0; num]);
    let (mut m2, mut v2) = (m.clone(), v.clone());
    for at in 1..=300 {
        let mut grads = rounded(&numbers(num, at as usize));
        (grads[20], grads[21]) = (bf16::INFINITY, bf16::NAN);
        let grads = GradSlices::Bf16(&grads);
        let with = step(at, WeightDecay::Decoupled);
        let weights = WeightSlices::Rounded { master: &mut copy, rounded: &mut rounded_copy };
        let moments = MomentSlices::F32 { exp_avg: &mut m, exp_avg_sq: &mut v };
        AdamSlices { weights, grads, moments }.step(&with).unwrap();
        let weights = WeightSlices::Split { high: &mut high, low: &mut low };
        let moments = MomentSlices::F32 { exp_avg: &mut m2, exp_avg_sq: &mut v2 };
        AdamSlices { weights, grads, moments }.step(&with).unwrap();
        for nth in 0..num {
            let joined = super::super::halves::joined(high[nth], low[nth]);
            assert_eq!(joined.to_bits(), copy[nth].to_bits(), "step {at}, {nth}: {joined} {}", copy[nth]);
            let is_middle = copy[nth].to_bits() & 0xffff == 0x8000;
            let are_same = rounded_copy[nth].to_bits() == high[nth].to_bits();
            assert!(are_same || is_middle || copy[nth].is_nan(), "step {at}, {nth}");
        }
    }
}

/// Steps of whole slices, and of the same ones cut in two on the way.
fn steps(rows: usize, row_len: usize, moments: &mut Stored, cut_row: Option<usize>) -> Vec<f32> {
    let num = rows * row_len;
    let mut w = numbers(num, 0);
    for at in 1..=STEPS {
        let grads = numbers(num, at as usize);
        let slices = AdamSlices {
            weights: WeightSlices::F32(&mut w),
            grads: GradSlices::F32(&grads),
            moments: moments.slices(row_len, at),
        };
        let with = step(at, WeightDecay::L2);
        match cut_row {
            None => { slices }.step(&with).unwrap(),
            Some(row) => {
                let (mut before, mut after) = slices.split_at(row * row_len);
                after.step(&with).unwrap();
                before.step(&with).unwrap();
            }
        }
    }
    w
}

#[derive(Debug, Clone, PartialEq)]
enum Stored {
    F32([Vec<f32>; 2]),
    Bf16([Vec<bf16>; 2]),
    EightBit([Vec<u8>; 2], [Vec<f32>; 2]),
}

impl Stored {
    fn all(rows: usize, row_len: usize) -> [Self; 3] {
        let (num, num_blocks) = (rows * row_len, rows * row_len.div_ceil(256));
        [
            Self::F32([vec![0.0; num], vec![0.0; num]]),
            Self::Bf16([vec![bf16::ZERO; num], vec![bf16::ZERO; num]]),
            Self::EightBit([vec![0; num], vec![0; num]], [vec![0.0; num_blocks], vec![0.0; num_blocks]]),
        ]
    }

    fn slices(&mut self, row_len: usize, step: u64) -> MomentSlices<'_> {
        match self {
            Self::F32([exp_avg, exp_avg_sq]) => MomentSlices::F32 { exp_avg, exp_avg_sq },
            Self::Bf16([exp_avg, exp_avg_sq]) => {
                MomentSlices::Bf16 { exp_avg, exp_avg_sq, draw: Draw::new(5, "w", step, 40) }
            }
            Self::EightBit([codes, square_codes], [absmax, square_absmax]) => MomentSlices::EightBit {
                exp_avg: Codes { codes, absmax },
                exp_avg_sq: Codes { codes: square_codes, absmax: square_absmax },
                row_len,
            },
        }
    }
}

#[test]
fn a_cut_at_any_row_changes_no_bit() {
    for (rows, row_len) in [(6, 300), (5, 256), (7, 9), (1, 1000)] {
        for whole in Stored::all(rows, row_len) {
            let mut uncut = whole.clone();
            let expected = steps(rows, row_len, &mut uncut, None);
            for row in 0..=rows {
                let mut cut = whole.clone();
                assert_eq!(
                    steps(rows, row_len, &mut cut, Some(row)),
                    expected,
                    "row {row} of {rows} × {row_len}"
                );
                assert_eq!(cut, uncut);
            }
        }
    }
}

/// Magnitudes of a block's gradients differ by up to 10,000, which is where 8 bits lose most: a fifth of the way of 0.2.
#[test]
fn fewer_bits_stay_near_f32() {
    let [mut f32s, mut bf16s, mut bits8] = Stored::all(8, 512);
    let expected = steps(8, 512, &mut f32s, None);
    for (moments, most) in [(&mut bf16s, 0.005), (&mut bits8, 0.06)] {
        let found = steps(8, 512, moments, None);
        let errors = found.iter().zip(&expected).map(|(a, b)| f64::from(a - b).abs());
        let mean = errors.sum::<f64>() / found.len() as f64;
        assert!(mean > 0.0 && mean < most, "{mean}");
    }
}

#[test]
fn slices_of_other_lengths_are_an_error() {
    let (mut w, mut m, mut v) = (vec![0.0; 3], vec![0.0; 3], vec![0.0; 2]);
    let mut slices = AdamSlices {
        weights: WeightSlices::F32(&mut w),
        grads: GradSlices::F32(&[0.0; 3]),
        moments: MomentSlices::F32 { exp_avg: &mut m, exp_avg_sq: &mut v },
    };
    let error = slices.step(&step(1, WeightDecay::L2)).unwrap_err().to_string();
    assert!(error.contains("not as many gradients and moments"), "{error}");
}
