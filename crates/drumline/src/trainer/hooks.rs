//! Calls callbacks in order, and keeps their failures until all ranks agree.
//!
//! A callback that fails on one rank must not leave the others waiting. Its rank completes the step, in which all ranks
//! take part, and reports the failure at the next agreement. Until then it calls no more hooks.

use std::collections::BTreeMap;

use drumline_torch::Named;
use serde_json::Value;

use super::callback::{Callback, MasterCallback};
use super::error::TrainerError;
use super::state::{Evaluation, TrainState};
use crate::comm::shared_failure::{LocalFailure, guarded};
use crate::data::loader::Cause;

/// When callbacks are called.
#[derive(Clone, Copy)]
pub(super) enum Hook<'e> {
    TrainBegin,
    EpochBegin,
    BatchBegin,
    LossBegin,
    BackwardBegin,
    BackwardEnd,
    StepEnd,
    BatchEnd,
    ValidBegin,
    ValidBatchEnd,
    ValidEnd(&'e Evaluation),
    EpochEnd,
    TrainEnd,
}

impl Hook<'_> {
    fn name(self) -> &'static str {
        match self {
            Self::TrainBegin => "on_train_begin",
            Self::EpochBegin => "on_epoch_begin",
            Self::BatchBegin => "on_batch_begin",
            Self::LossBegin => "on_loss_begin",
            Self::BackwardBegin => "on_backward_begin",
            Self::BackwardEnd => "on_backward_end",
            Self::StepEnd => "on_step_end",
            Self::BatchEnd => "on_batch_end",
            Self::ValidBegin => "on_valid_begin",
            Self::ValidBatchEnd => "on_valid_batch_end",
            Self::ValidEnd(_) => "on_valid_end",
            Self::EpochEnd => "on_epoch_end",
            Self::TrainEnd => "on_train_end",
        }
    }
}

/// Calls the hook of a callback of either kind.
macro_rules! call {
    ($hook:expr, $callback:expr, $state:expr) => {
        match $hook {
            Hook::TrainBegin => $callback.on_train_begin($state),
            Hook::EpochBegin => $callback.on_epoch_begin($state),
            Hook::BatchBegin => $callback.on_batch_begin($state),
            Hook::LossBegin => $callback.on_loss_begin($state),
            Hook::BackwardBegin => $callback.on_backward_begin($state),
            Hook::BackwardEnd => $callback.on_backward_end($state),
            Hook::StepEnd => $callback.on_step_end($state),
            Hook::BatchEnd => $callback.on_batch_end($state),
            Hook::ValidBegin => $callback.on_valid_begin($state),
            Hook::ValidBatchEnd => $callback.on_valid_batch_end($state),
            Hook::ValidEnd(evaluation) => $callback.on_valid_end($state, evaluation),
            Hook::EpochEnd => $callback.on_epoch_end($state),
            Hook::TrainEnd => $callback.on_train_end($state),
        }
    };
}

/// All callbacks of this rank.
#[derive(Default)]
pub(super) struct Hooks<'a> {
    pub(super) all: Vec<Box<dyn Callback + 'a>>,
    /// Empty except on rank 0.
    pub(super) master: Vec<Box<dyn MasterCallback + 'a>>,
    failure: Option<LocalFailure>,
}

impl Hooks<'_> {
    /// Calls a hook, and keeps its error.
    pub(super) fn call(&mut self, hook: Hook<'_>, state: &mut TrainState) {
        let within = |failure: LocalFailure, name: String| {
            failure.within(&format!("callback `{name}`, {}", hook.name()))
        };
        for callback in &mut self.all {
            if self.failure.is_none() {
                let called = guarded(|| call!(hook, callback, state));
                self.failure = called.err().map(|failure| within(failure, callback.name()));
            }
        }
        for callback in &mut self.master {
            if self.failure.is_none() {
                let called = guarded(|| call!(hook, callback, state));
                self.failure = called.err().map(|failure| within(failure, callback.name()));
            }
        }
    }

    /// Calls `on_exception` of all callbacks. Their errors are only logged.
    pub(super) fn exception(&mut self, state: &mut TrainState, error: &TrainerError) {
        for callback in &mut self.all {
            warn_if_failed(&callback.name(), guarded(|| callback.on_exception(state, error)));
        }
        for callback in &mut self.master {
            warn_if_failed(&callback.name(), guarded(|| callback.on_exception(state, error)));
        }
    }

    /// Whether this rank has no callbacks.
    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty() && self.master.is_empty()
    }

    /// Keeps a failure from outside of callbacks. The first failure counts.
    pub(super) fn note(&mut self, failure: LocalFailure) {
        self.failure.get_or_insert(failure);
    }

    /// The failure of this rank, if there is one.
    pub(super) fn failure(&self) -> Option<&LocalFailure> {
        self.failure.as_ref()
    }

    /// The names of the callbacks that run on all ranks.
    pub(super) fn names(&self) -> Vec<String> {
        self.all.iter().map(|callback| callback.name()).collect()
    }

    /// The states to save in checkpoints, by name and place among callbacks of the same name.
    pub(super) fn state(&self) -> BTreeMap<String, Value> {
        let states = keys(&self.names()).into_iter().zip(self.all.iter().map(|callback| callback.state()));
        states.filter(|(_, state)| !state.is_null()).collect()
    }

    /// The weights to evaluate instead of the trained ones, if a callback has any. Returns an error if more than one
    /// has.
    pub(super) fn evaluation_weights(&self) -> Result<Option<&[Named]>, Cause> {
        let mut with =
            self.all.iter().filter_map(|callback| Some((callback.evaluation_weights()?, callback)));
        match (with.next(), with.next()) {
            (Some((_, one)), Some((_, other))) => Err(format!(
                "callbacks `{}` and `{}` both have weights to evaluate; try one of them",
                one.name(),
                other.name()
            )
            .into()),
            (one, _) => Ok(one.map(|(weights, _)| weights)),
        }
    }

    /// Passes the evaluated weights of a checkpoint to all callbacks.
    pub(super) fn load_evaluation_weights(&mut self, weights: &[Named]) -> Result<(), Cause> {
        self.all.iter_mut().try_for_each(|callback| callback.load_evaluation_weights(weights))
    }

    /// Loads the states of a checkpoint. Callbacks that it does not contain keep their initial state.
    pub(super) fn load_state(&mut self, states: &BTreeMap<String, Value>) -> Result<(), Cause> {
        let names = self.names();
        let states = by_key(states);
        for (key, callback) in keys(&names).iter().zip(&mut self.all) {
            if let Some(state) = states.get(key) {
                callback.load_state(state)?;
            }
        }
        Ok(())
    }
}

/// A key for each name: `Name`, and for repeated names `Name.2`, `Name.3`. Adding or removing other callbacks does not
/// change it.
fn keys<S: AsRef<str>>(names: &[S]) -> Vec<String> {
    let key = |(place, name): (usize, &S)| {
        let name = name.as_ref();
        match names[..place].iter().filter(|before| before.as_ref() == name).count() {
            0 => name.to_owned(),
            before => format!("{name}.{}", before + 1),
        }
    };
    names.iter().enumerate().map(key).collect()
}

/// The states by today's keys, also those of old checkpoints, which used the place among all callbacks, as `3.Name`.
fn by_key(states: &BTreeMap<String, Value>) -> BTreeMap<String, &Value> {
    let mut placed: Vec<_> = states.iter().filter_map(|(key, state)| Some((placed(key)?, state))).collect();
    placed.sort_by_key(|((place, _), _)| *place);
    let names: Vec<_> = placed.iter().map(|((_, name), _)| *name).collect();
    let of_place = keys(&names).into_iter().zip(placed.iter().map(|(_, state)| *state));
    let of_name = states.iter().filter(|(key, _)| self::placed(key).is_none());
    of_place.chain(of_name.map(|(key, state)| (key.clone(), state))).collect()
}

fn placed(key: &str) -> Option<(usize, &str)> {
    let (place, name) = key.split_once('.')?;
    Some((place.parse().ok()?, name))
}

fn warn_if_failed(name: &str, outcome: Result<(), LocalFailure>) {
    if let Err(failure) = outcome {
        tracing::warn!("callback `{name}`, on_exception: {}", failure.text);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A callback with any name, whose state is a number.
    struct Counting(&'static str, u64);

    impl Callback for Counting {
        fn name(&self) -> String {
            self.0.to_owned()
        }

        fn state(&self) -> Value {
            json!(self.1)
        }

        fn load_state(&mut self, state: &Value) -> Result<(), Cause> {
            self.1 = state.as_u64().ok_or("no number")?;
            Ok(())
        }
    }

    fn hooks(names: &[(&'static str, u64)]) -> Hooks<'static> {
        let all = names.iter().map(|&(name, number)| Box::new(Counting(name, number)) as Box<dyn Callback>);
        Hooks { all: all.collect(), ..Hooks::default() }
    }

    fn loaded(names: &[(&'static str, u64)], states: &BTreeMap<String, Value>) -> Vec<Value> {
        let mut hooks = hooks(names);
        hooks.load_state(states).unwrap();
        hooks.all.iter().map(|callback| callback.state()).collect()
    }

    #[test]
    fn states_are_found_although_other_callbacks_come_and_go() {
        let saved = hooks(&[("Clip", 1), ("Warmup", 2), ("Stop", 3), ("Warmup", 4)]).state();
        assert_eq!(saved.keys().collect::<Vec<_>>(), ["Clip", "Stop", "Warmup", "Warmup.2"]);
        let without_clip = [("Warmup", 0), ("Stop", 0), ("Warmup", 0)];
        assert_eq!(loaded(&without_clip, &saved), [2, 3, 4]);
        let with_more = [("New", 9), ("Stop", 0), ("Clip", 0), ("Warmup", 0), ("Warmup", 0), ("Warmup", 8)];
        assert_eq!(loaded(&with_more, &saved), [9, 3, 1, 2, 4, 8], "new callbacks keep their initial state");
    }

    #[test]
    fn old_states_by_place_are_found_by_name() {
        let old = [("0.Clip", 1), ("10.Warmup", 4), ("2.Warmup", 2), ("3.a.b", 5)];
        let old = old.map(|(key, number)| (key.to_owned(), json!(number))).into();
        assert_eq!(loaded(&[("Warmup", 0), ("a.b", 0), ("Warmup", 0)], &old), [2, 5, 4]);
    }
}
