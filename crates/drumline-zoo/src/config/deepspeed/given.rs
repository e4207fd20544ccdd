//! What this configuration gives to a `ds_config.json`: the values that replace `"auto"`.

use std::collections::BTreeMap;

use drumline::config::deepspeed::{Argument, Betas, Compute, Given, StepCounts, WarmupLength};

use super::{DeepSpeedFile, Seen};
use crate::config::table::{self, Table};
use crate::config::{PrecisionKind, Value, setting::Setting};

/// The values of a table by their keys, and which of them were given.
pub(super) struct Values<'a> {
    values: BTreeMap<String, Value>,
    seen: &'a Seen,
}

impl<'a> Values<'a> {
    pub(super) fn of<T: Table>(table: &T, seen: &'a Seen) -> Self {
        let entries = table::entries(table).into_iter().map(|entry| (entry.key, entry.value));
        Self { values: entries.collect(), seen }
    }

    /// Whether the table has this key.
    pub(super) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// Where a key was given; `None` for a default.
    pub(super) fn place(&self, key: &str) -> Option<String> {
        self.seen.get(key).map(ToString::to_string)
    }

    /// Whether a key has this value.
    pub(super) fn is(&self, key: &str, value: &Value) -> bool {
        self.values.get(key) == Some(value)
    }

    /// The value of a key for messages.
    pub(super) fn shown(&self, key: &str) -> String {
        self.values.get(key).map(ToString::to_string).unwrap_or_default()
    }

    pub(super) fn read<S: Setting>(&self, key: &str) -> Option<S> {
        S::read(self.values.get(key)?)
    }

    /// The value of a key as an argument, which names its key and its place.
    fn argument<S: Setting>(&self, key: &str) -> Option<Argument<S>> {
        let value = self.read(key)?;
        Some(match self.place(key) {
            Some(place) => Argument::given(format!("{key} ({place})"), value),
            None => Argument::default(key, value),
        })
    }
}

/// All that a `ds_config.json` may take from the table. Keys that the task does not have are not given.
pub(super) fn given(values: &Values<'_>, file: &DeepSpeedFile) -> Given {
    let size = |key: &str| values.argument::<u64>(key);
    let number = |key: &str| values.argument::<f64>(key);
    let hidden = ["MODEL.N_EMBD", "MODEL.HIDDEN_SIZE"];
    Given {
        num_ranks: file.num_ranks as u64,
        micro_batch: size("TRAIN.BATCH_SIZE"),
        accumulation: size("TRAIN.ACCUMULATE"),
        clip_norm: values
            .argument::<Option<f64>>("OPTIM.GRAD_CLIP")
            .map(|norm| mapped(norm, |norm| norm.unwrap_or(0.0))),
        compute: values.argument("PRECISION").map(|kind| mapped(kind, compute)),
        lr: number("OPTIM.BASE_LR"),
        betas: betas(values),
        eps: number("OPTIM.EPS"),
        weight_decay: number("OPTIM.WEIGHT_DECAY"),
        momentum: number("OPTIM.MOMENTUM"),
        foreign_optimizer: None,
        warmup: number("OPTIM.WARMUP").map(|warmup| mapped(warmup, length)),
        steps: StepCounts::AtStart,
        hidden_size: hidden.iter().find_map(|key| values.read(key)),
        is_strict: file.is_strict,
    }
}

fn mapped<A, B>(argument: Argument<A>, into: impl FnOnce(A) -> B) -> Argument<B> {
    let Argument { value, name, is_default } = argument;
    Argument { value: into(value), name, is_default }
}

fn compute(kind: PrecisionKind) -> Compute {
    match kind {
        PrecisionKind::Fp32 => Compute::F32,
        PrecisionKind::Bf16 | PrecisionKind::Bf16Master => Compute::Bf16,
        PrecisionKind::Fp16 => Compute::Fp16,
    }
}

fn betas(values: &Values<'_>) -> Option<Argument<Betas>> {
    let betas = values.argument::<Vec<f64>>("OPTIM.BETAS")?;
    let [first, second] = betas.value[..] else { return None };
    Some(mapped(betas, |_| Betas(first, second)))
}

fn length(warmup: f64) -> WarmupLength {
    if warmup < 1.0 { WarmupLength::Fraction(warmup) } else { WarmupLength::Steps(warmup as u64) }
}
