//! The weights and gradients of an optimizer's step, as slices that a kernel reads and writes in f32, some at a time.

use half::bf16;

use super::halves::{joined, nearest, split, widened};

/// How many elements a kernel steps together: few enough to stay in the innermost cache, and that the processor reads
/// the next ones while it computes.
pub(super) const CHUNK: usize = 256;

/// The elements of a chunk in f32.
#[derive(Debug)]
#[repr(align(64))]
pub(super) struct Chunk(pub(super) [f32; CHUNK]);

impl Chunk {
    #[inline(always)]
    pub(super) fn new() -> Self {
        Self([0.0; CHUNK])
    }
}

/// Weights that a step changes.
#[derive(Debug)]
pub enum WeightSlices<'a> {
    /// f32 weights.
    F32(&'a mut [f32]),
    /// f32 master weights, and the bf16 weights that they are rounded into.
    Rounded {
        /// The f32 weights.
        master: &'a mut [f32],
        /// The bf16 weights, which are only written.
        rounded: &'a mut [bf16],
    },
    /// f32 master weights in two halves: the high one is the bf16 weight.
    Split {
        /// The bf16 weights.
        high: &'a mut [bf16],
        /// What they lack of the f32 weights.
        low: &'a mut [i16],
    },
}

/// The gradients of a step.
#[derive(Debug, Clone, Copy)]
pub enum GradSlices<'a> {
    /// In f32.
    F32(&'a [f32]),
    /// In bf16.
    Bf16(&'a [bf16]),
}

/// A weight in memory, with a twin that belongs to it.
pub(super) trait Weight<Twin>: Copy {
    fn number(self, twin: Twin) -> f32;
    fn of(number: f32) -> (Self, Twin);
}

impl Weight<()> for f32 {
    #[inline(always)]
    fn number(self, (): ()) -> f32 {
        self
    }

    #[inline(always)]
    fn of(number: f32) -> (Self, ()) {
        (number, ())
    }
}

/// The twin is the rounded weight.
impl Weight<bf16> for f32 {
    #[inline(always)]
    fn number(self, _: bf16) -> f32 {
        self
    }

    #[inline(always)]
    fn of(number: f32) -> (Self, bf16) {
        (number, nearest(number))
    }
}

/// The twin is the low half.
impl Weight<i16> for bf16 {
    #[inline(always)]
    fn number(self, low: i16) -> f32 {
        joined(self, low)
    }

    #[inline(always)]
    fn of(number: f32) -> (Self, i16) {
        split(number)
    }
}

/// A gradient in memory.
pub(super) trait Grad: Copy {
    fn number(self) -> f32;
}

impl Grad for f32 {
    #[inline(always)]
    fn number(self) -> f32 {
        self
    }
}

impl Grad for bf16 {
    #[inline(always)]
    fn number(self) -> f32 {
        widened(self)
    }
}

/// Evaluates `$body` with the slices of weights, of their twins and of gradients, which have one length.
macro_rules! with_slices {
    ($elements:expr, |$weights:ident, $twins:ident, $grads:ident| $body:expr) => {{
        use $crate::kernels::weights::{GradSlices, WeightSlices};
        match $elements {
            (WeightSlices::F32($weights), GradSlices::F32($grads)) => {
                let $twins = &mut vec![(); $weights.len()][..];
                $body
            }
            (WeightSlices::F32($weights), GradSlices::Bf16($grads)) => {
                let $twins = &mut vec![(); $weights.len()][..];
                $body
            }
            (WeightSlices::Rounded { master: $weights, rounded: $twins }, GradSlices::F32($grads)) => $body,
            (WeightSlices::Rounded { master: $weights, rounded: $twins }, GradSlices::Bf16($grads)) => $body,
            (WeightSlices::Split { high: $weights, low: $twins }, GradSlices::F32($grads)) => $body,
            (WeightSlices::Split { high: $weights, low: $twins }, GradSlices::Bf16($grads)) => $body,
        }
    }};
}
pub(super) use with_slices;

/// Weights with their gradients.
#[derive(Debug)]
pub(crate) struct Elements<'a> {
    pub(crate) weights: WeightSlices<'a>,
    pub(crate) grads: GradSlices<'a>,
}

impl Elements<'_> {
    pub(crate) fn len(&self) -> usize {
        self.grads.len()
    }

    /// Those before `at`, and those from it on.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        let (weights, other_weights) = self.weights.split_at(at);
        let (grads, other_grads) = self.grads.split_at(at);
        (Self { weights, grads }, Self { weights: other_weights, grads: other_grads })
    }
}

/// The sum of squares, in an order that does not depend on the instruction set.
#[inline(always)]
pub(super) fn sum_of_squares(numbers: &[f32]) -> f64 {
    let mut lanes = [0.0; 16];
    for some in numbers.chunks(lanes.len()) {
        for (lane, number) in lanes.iter_mut().zip(some) {
            *lane += f64::from(*number) * f64::from(*number);
        }
    }
    lanes.iter().sum()
}

impl WeightSlices<'_> {
    /// How many weights there are; `None` if slices have different lengths.
    pub(super) fn len(&self) -> Option<usize> {
        match self {
            Self::F32(weights) => Some(weights.len()),
            Self::Rounded { master, rounded } => (master.len() == rounded.len()).then_some(master.len()),
            Self::Split { high, low } => (high.len() == low.len()).then_some(high.len()),
        }
    }

    /// Those before `at`, and those from it on.
    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(weights) => {
                let (before, after) = weights.split_at_mut(at);
                (Self::F32(before), Self::F32(after))
            }
            Self::Rounded { master, rounded } => {
                let (master, masters) = master.split_at_mut(at);
                let (rounded, others) = rounded.split_at_mut(at);
                (Self::Rounded { master, rounded }, Self::Rounded { master: masters, rounded: others })
            }
            Self::Split { high, low } => {
                let (high, highs) = high.split_at_mut(at);
                let (low, lows) = low.split_at_mut(at);
                (Self::Split { high, low }, Self::Split { high: highs, low: lows })
            }
        }
    }

    /// Copies the weights from `at` on.
    #[inline(always)]
    pub(super) fn load(&self, at: usize, to: &mut [f32]) {
        let range = at..at + to.len();
        match self {
            Self::F32(weights) | Self::Rounded { master: weights, .. } => to.copy_from_slice(&weights[range]),
            Self::Split { high, low } => {
                for ((to, high), low) in to.iter_mut().zip(&high[range.clone()]).zip(&low[range]) {
                    *to = joined(*high, *low);
                }
            }
        }
    }

    /// Writes the weights from `at` on.
    #[inline(always)]
    pub(super) fn store(&mut self, at: usize, from: &[f32]) {
        let range = at..at + from.len();
        match self {
            Self::F32(weights) => weights[range].copy_from_slice(from),
            Self::Rounded { master, rounded } => {
                master[range.clone()].copy_from_slice(from);
                for (rounded, from) in rounded[range].iter_mut().zip(from) {
                    *rounded = nearest(*from);
                }
            }
            Self::Split { high, low } => {
                for ((high, low), from) in high[range.clone()].iter_mut().zip(&mut low[range]).zip(from) {
                    (*high, *low) = split(*from);
                }
            }
        }
    }
}

impl GradSlices<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::F32(grads) => grads.len(),
            Self::Bf16(grads) => grads.len(),
        }
    }

    pub(super) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::F32(grads) => {
                let (before, after) = grads.split_at(at);
                (Self::F32(before), Self::F32(after))
            }
            Self::Bf16(grads) => {
                let (before, after) = grads.split_at(at);
                (Self::Bf16(before), Self::Bf16(after))
            }
        }
    }

    /// Copies the gradients from `at` on, times `factor`.
    #[inline(always)]
    pub(super) fn load(&self, at: usize, to: &mut [f32], factor: f32) {
        let range = at..at + to.len();
        match self {
            Self::F32(grads) => {
                for (to, grad) in to.iter_mut().zip(&grads[range]) {
                    *to = grad * factor;
                }
            }
            Self::Bf16(grads) => {
                for (to, grad) in to.iter_mut().zip(&grads[range]) {
                    *to = widened(*grad) * factor;
                }
            }
        }
    }
}
