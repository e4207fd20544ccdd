//! What a program was given beside the file: the values that replace `"auto"`, and that others must not contradict.

use std::fmt;

use super::plan::Compute;

/// An argument of the program, with the name under which the user knows it.
#[derive(Debug, Clone, PartialEq)]
pub struct Argument<T> {
    /// Its value.
    pub value: T,
    /// Its name, for messages: `TRAIN.BATCH_SIZE`, `the loader's batch size`.
    pub name: String,
    /// Whether nobody gave it. A default fills `"auto"`, but a file may have another value.
    pub is_default: bool,
}

impl<T> Argument<T> {
    /// An argument that was given: a file with another value contradicts it.
    pub fn given(name: impl Into<String>, value: T) -> Self {
        Self { value, name: name.into(), is_default: false }
    }

    /// A default, which the file may override.
    pub fn default(name: impl Into<String>, value: T) -> Self {
        Self { value, name: name.into(), is_default: true }
    }
}

/// The decay rates of Adam's means.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Betas(pub f64, pub f64);

impl fmt::Display for Betas {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}]", self.0, self.1)
    }
}

/// How long a warm-up is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum WarmupLength {
    /// A number of steps.
    Steps(u64),
    /// A fraction of all steps, rounded up.
    Fraction(f64),
}

impl fmt::Display for WarmupLength {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Steps(steps) => write!(f, "{steps}"),
            Self::Fraction(fraction) => write!(f, "{fraction} of all steps"),
        }
    }
}

/// What is known of the number of steps when the file is read.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum StepCounts {
    /// Nothing, and nothing will be: `"auto"` is an error.
    #[default]
    Unknown,
    /// The number of steps of the whole training.
    Total(Argument<u64>),
    /// The number is known when training begins; see [`SchedulerPlan::policy`](super::SchedulerPlan::policy).
    AtStart,
}

/// What a program was given beside the file. All but the number of ranks may be missing.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Given {
    /// The data-parallel size: ranks that train on samples of their own.
    pub num_ranks: u64,
    /// Samples of a forward on one rank.
    pub micro_batch: Option<Argument<u64>>,
    /// Micro-batches of a step.
    pub accumulation: Option<Argument<u64>>,
    /// The norm to which gradients are clipped; 0 for none.
    pub clip_norm: Option<Argument<f64>>,
    /// The precision of computations.
    pub compute: Option<Argument<Compute>>,
    /// The learning rate.
    pub lr: Option<Argument<f64>>,
    /// Adam's betas.
    pub betas: Option<Argument<Betas>>,
    /// Adam's epsilon.
    pub eps: Option<Argument<f64>>,
    /// Weight decay.
    pub weight_decay: Option<Argument<f64>>,
    /// SGD's momentum.
    pub momentum: Option<Argument<f64>>,
    /// The name of an optimizer that the program brings and that is none of Drumline's.
    pub foreign_optimizer: Option<String>,
    /// The length of the warm-up.
    pub warmup: Option<Argument<WarmupLength>>,
    /// The number of steps.
    pub steps: StepCounts,
    /// The size of the model's hidden states, from which bucket sizes and thresholds follow.
    pub hidden_size: Option<u64>,
    /// Whether keys that DeepSpeed does not have, or has elsewhere, are mistakes.
    pub is_strict: bool,
}

impl Given {
    /// Nothing but a number of ranks.
    pub fn ranks(num_ranks: u64) -> Self {
        Self { num_ranks, ..Self::default() }
    }
}
