//! What this configuration gives to a `ds_config.json`: the values that replace `"auto"`.

use std::collections::BTreeMap;

use drumline::config::deepspeed::{Argument, Betas, Compute, Given, StepCounts, WarmupLength};

use super::names::{BASE_LR, CLIP, Names};
use super::{DeepSpeedFile, Seen};
use crate::config::table::{self, Table};
use crate::config::{PrecisionKind, Value, setting::Setting};

/// The warm-up of NJUNMT's schedules.
const WARMUP_STEPS: &str = "optimizer_configs.scheduler_configs.warmup_steps";

/// The key of NJUNMT's schedules.
const SCHEDULE_METHOD: &str = "optimizer_configs.schedule_method";

/// The values of a table, and which of them were given. Keys have the names that most tasks use, whatever this task
/// calls them.
pub(super) struct Values<'a> {
    values: BTreeMap<String, Value>,
    seen: &'a Seen,
    names: Names,
    /// Whether the learning rate is the factor of a schedule that the file replaces.
    lr_is_factor: bool,
}

impl<'a> Values<'a> {
    pub(super) fn of<T: Table>(table: &T, seen: &'a Seen, has_scheduler: bool) -> Self {
        let entries = table::entries(table).into_iter().map(|entry| (entry.key, entry.value));
        let values: BTreeMap<_, _> = entries.collect();
        let is_noam = values.get(SCHEDULE_METHOD) == Some(&Value::Text("noam".into()));
        let names = Names::of(|key| values.contains_key(key));
        Self { values, seen, names, lr_is_factor: is_noam && has_scheduler }
    }

    /// The task's name for a key.
    pub(super) fn own(&self, key: &str) -> String {
        self.names.own(key).to_owned()
    }

    pub(super) fn names(&self) -> Names {
        self.names
    }

    fn value(&self, key: &str) -> Option<&Value> {
        self.values.get(self.names.own(key)).filter(|_| !(self.lr_is_factor && key == BASE_LR))
    }

    /// Whether the table has this key.
    pub(super) fn has(&self, key: &str) -> bool {
        self.values.contains_key(self.names.own(key))
    }

    /// Where a key was given; `None` for a default.
    pub(super) fn place(&self, key: &str) -> Option<String> {
        let is_used = self.value(key).is_some();
        self.seen.get(self.names.own(key)).filter(|_| is_used).map(ToString::to_string)
    }

    /// Whether a key has this value.
    pub(super) fn is(&self, key: &str, value: &Value) -> bool {
        self.value(key) == Some(value)
    }

    /// The value of a key for messages.
    pub(super) fn shown(&self, key: &str) -> String {
        self.value(key).map(ToString::to_string).unwrap_or_default()
    }

    pub(super) fn read<S: Setting>(&self, key: &str) -> Option<S> {
        S::read(self.value(key)?)
    }

    /// The value of a key as an argument, which names its key and its place.
    fn argument<S: Setting>(&self, key: &str) -> Option<Argument<S>> {
        let (value, own) = (self.read(key)?, self.own(key));
        Some(match self.place(key) {
            Some(place) => Argument::given(format!("{own} ({place})"), value),
            None => Argument::default(own, value),
        })
    }
}

/// All that a `ds_config.json` may take from the table. Keys that the task does not have are not given.
pub(super) fn given(values: &Values<'_>, file: &DeepSpeedFile) -> Given {
    let size = |key: &str| values.argument::<u64>(key);
    let number = |key: &str| values.argument::<f64>(key);
    let hidden = ["MODEL.N_EMBD", "MODEL.HIDDEN_SIZE"];
    Given {
        num_ranks: replicas(values, file.num_ranks),
        micro_batch: size("TRAIN.BATCH_SIZE"),
        accumulation: size("TRAIN.ACCUMULATE"),
        clip_norm: values
            .argument::<Option<f64>>(CLIP)
            .map(|norm| mapped(norm, |norm| norm.unwrap_or(0.0).max(0.0))),
        compute: values.argument("PRECISION").map(|kind| mapped(kind, compute)),
        lr: number(BASE_LR),
        betas: betas(values),
        eps: number("OPTIM.EPS"),
        weight_decay: number("OPTIM.WEIGHT_DECAY"),
        momentum: number("OPTIM.MOMENTUM"),
        foreign_optimizer: None,
        warmup: number("OPTIM.WARMUP").or_else(|| number(WARMUP_STEPS)).map(|warmup| mapped(warmup, length)),
        steps: StepCounts::AtStart,
        hidden_size: hidden.iter().find_map(|key| values.read(key)),
        is_strict: file.is_strict,
    }
}

/// The ranks that have different samples: those along `tp` and `cp` have the same ones. Where the ranks do not divide,
/// `PARALLEL` is refused later.
fn replicas(values: &Values<'_>, num_ranks: usize) -> u64 {
    let size = |key: &str| values.read::<usize>(key).unwrap_or(1).max(1);
    let cut = size("PARALLEL.TP").saturating_mul(size("PARALLEL.CP"));
    (num_ranks / cut).max(1) as u64
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::table::load_with_deepspeed;
    use crate::gpt::GptConfig;

    /// The micro-batch of 4 ranks.
    fn micro_batch(pairs: &[&str]) -> Result<u64, String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), r#"{"train_batch_size": 16, "gradient_accumulation_steps": 2}"#).unwrap();
        let argument = file.path().display().to_string();
        let file = DeepSpeedFile { argument, is_strict: false, num_ranks: 4, device: None };
        let pairs = [&["GPT.TRAIN", "a.tokens", "GPT.DEV", "b.tokens"], pairs].concat();
        let config = load_with_deepspeed::<GptConfig, _>(None, &pairs, &file);
        config.map(|config| config.shared.train.batch_size as u64).map_err(|error| error.to_string())
    }

    #[test]
    fn ranks_that_cut_the_model_or_its_texts_have_the_same_samples() {
        assert_eq!(micro_batch(&[]), Ok(2));
        assert_eq!(micro_batch(&["PARALLEL.TP", "2"]), Ok(4));
        assert_eq!(micro_batch(&["PARALLEL.CP", "2"]), Ok(4));
        assert_eq!(micro_batch(&["PARALLEL.TP", "2", "PARALLEL.CP", "2"]), Ok(8));
    }
}
