//! Metrics of an evaluation or a step: named, all reduced in one collective, and one that decides which model is best.

use std::fmt;
use std::num::NonZeroUsize;

use drumline_comm::{CommError, ProcessGroup, ReduceOp};
use tch::Tensor;

use super::batch::Supervised;
use crate::data::loader::Cause;
use crate::metrics::Metric;

/// A metric that is computed from sums over the batches of an evaluation or a step, for outputs `O` of batches `B`. It
/// is exact over ranks. Every [`Metric`] is one.
pub trait BatchMetric<B, O> {
    /// Adds a batch of this rank.
    fn update(&mut self, output: &O, batch: &B) -> Result<(), Cause>;

    /// This rank's sums and counts, always of the same length; zeros before the first batch.
    fn sums(&self) -> Vec<f64>;

    /// The value for these sums.
    fn value_of(&self, sums: &[f64]) -> f64;

    /// Forgets all batches.
    fn reset(&mut self);

    /// Whether this evaluation measures the metric. It is called when the evaluation begins, and must be the same on
    /// all ranks. Return false for a metric that takes too long to be measured each time.
    fn is_due(&self) -> bool {
        true
    }

    /// Whether [`update`](Self::update) runs the model, as a metric of generated text does; the same on all ranks. Where
    /// ranks divide parameters, all of them are then gathered for the evaluation.
    fn uses_model(&self) -> bool {
        false
    }
}

impl<T: Metric, B: Supervised> BatchMetric<B, Tensor> for T {
    fn update(&mut self, output: &Tensor, batch: &B) -> Result<(), Cause> {
        Ok(Metric::update(self, output, batch.target())?)
    }

    fn sums(&self) -> Vec<f64> {
        Metric::sums(self)
    }

    fn value_of(&self, sums: &[f64]) -> f64 {
        Metric::value_of(self, sums)
    }

    fn reset(&mut self) {
        Metric::reset(self);
    }
}

/// The name of the loss among the metrics.
pub(super) const LOSS: &str = "loss";

/// A metric with its name.
pub(super) type Scored<'a, B, O> = (String, Box<dyn BatchMetric<B, O> + 'a>);

/// The metrics of the program, in order.
pub(super) struct Scores<'a, B, O>(pub(super) Vec<Scored<'a, B, O>>);

impl<'a, B, O> Scores<'a, B, O> {
    pub(super) fn reset(&mut self) {
        self.0.iter_mut().for_each(|(_, metric)| metric.reset());
    }

    pub(super) fn update(&mut self, output: &O, batch: &B) -> Result<(), Cause> {
        for (name, metric) in self.0.iter_mut().filter(|(_, metric)| metric.is_due()) {
            let updated = metric.update(output, batch);
            updated.map_err(|cause| format!("metric `{name}`: {cause}"))?;
        }
        Ok(())
    }

    /// The value of each metric over the batches of all ranks, after the mean loss, of which this rank has the sum and
    /// the count.
    #[track_caller]
    pub(super) fn reduce(
        &self,
        loss: [f64; 2],
        group: &ProcessGroup,
    ) -> Result<Vec<(String, f64)>, CommError> {
        let mut all = [&loss[..], &self.sums()].concat();
        group.all_reduce(&mut all, ReduceOp::Sum)?;
        let loss = (LOSS.to_owned(), all[0] / all[1]);
        Ok(std::iter::once(loss).chain(self.values_of(&all[2..])).collect())
    }

    /// This rank's sums of all metrics.
    pub(super) fn sums(&self) -> Vec<f64> {
        self.due().flat_map(|(_, metric)| metric.sums()).collect()
    }

    /// The value of each metric for these sums.
    pub(super) fn values_of(&self, sums: &[f64]) -> Vec<(String, f64)> {
        let mut rest = sums;
        let values = self.due().map(|(name, metric)| {
            let (these, others) = rest.split_at(metric.sums().len());
            rest = others;
            (name.clone(), metric.value_of(these))
        });
        values.collect()
    }

    fn due(&self) -> impl Iterator<Item = &Scored<'a, B, O>> {
        self.0.iter().filter(|(_, metric)| metric.is_due())
    }

    /// Whether a metric of this evaluation runs the model by itself.
    pub(super) fn use_model(&self) -> bool {
        self.due().any(|(_, metric)| metric.uses_model())
    }

    /// The first metric that may run the model by itself.
    pub(super) fn that_uses_model(&self) -> Option<&str> {
        self.0.iter().find(|(_, metric)| metric.uses_model()).map(|(name, _)| name.as_str())
    }

    /// The names that a metric key may have. Returns an error if a name is used twice.
    pub(super) fn names(&self) -> Result<Vec<&str>, Cause> {
        let mut names = vec![LOSS];
        for (name, _) in &self.0 {
            if names.contains(&name.as_str()) {
                return Err(format!("there are two metrics `{name}`; try another name for one").into());
            }
            names.push(name);
        }
        Ok(names)
    }
}

/// The metric that decides which model is best: `acc`, or `-loss` where smaller is better.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricKey {
    name: String,
    smaller_is_better: bool,
}

/// As [`DistTrainer::metric_key`](super::DistTrainer::metric_key) takes it.
impl fmt::Display for MetricKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", if self.smaller_is_better { "-" } else { "" }, self.name)
    }
}

impl MetricKey {
    /// Parses a key, which must name one of `known`. By default it is the first metric after the loss, or the loss
    /// itself.
    pub(super) fn parse(key: Option<&str>, known: &[&str]) -> Result<Self, Cause> {
        let key = match (key, known) {
            (Some(key), _) => key.trim(),
            (None, [_, first, ..]) => first,
            (None, _) => "-loss",
        };
        let (name, smaller_is_better) = match key.strip_prefix('-') {
            Some(name) => (name, true),
            None => (key, false),
        };
        if !known.contains(&name) {
            let known: Vec<_> = known.iter().map(|name| format!("`{name}`")).collect();
            let known = known.join(", ");
            return Err(format!("metric_key: there is no metric `{name}`; try one of {known}").into());
        }
        Ok(Self { name: name.to_owned(), smaller_is_better })
    }

    /// The metric.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether smaller values are better, as for a loss.
    pub fn smaller_is_better(&self) -> bool {
        self.smaller_is_better
    }

    /// Inserts a value into the `keep` best, which are sorted, and returns its place, counted from 1; `None` if it is
    /// not among them. NaN and infinities never are.
    pub(super) fn rank(&self, value: f64, best: &mut Vec<f64>, keep: usize) -> Option<NonZeroUsize> {
        if !value.is_finite() {
            return None;
        }
        // Of equal values the earlier one is better.
        let place = best.iter().take_while(|other| !self.is_better(value, Some(**other))).count();
        if place >= keep {
            return None;
        }
        best.insert(place, value);
        best.truncate(keep);
        NonZeroUsize::new(place + 1)
    }

    /// Whether `value` is better than the `best` so far. NaN never is, and infinity is not as the first value.
    pub fn is_better(&self, value: f64, best: Option<f64>) -> bool {
        match best {
            None => value.is_finite(),
            Some(best) if self.smaller_is_better => value < best,
            Some(best) => value > best,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_name_a_metric_and_its_direction() {
        let key = |text| MetricKey::parse(Some(text), &["loss", "acc"]);
        let (acc, loss) = (key("acc").unwrap(), key("-loss").unwrap());
        assert!(acc.is_better(0.5, Some(0.4)) && !acc.is_better(0.4, Some(0.4)));
        assert!(loss.is_better(0.3, Some(0.4)) && !loss.is_better(0.5, Some(0.4)));
        assert!(acc.is_better(0.0, None) && !acc.is_better(f64::NAN, None));
        assert!(!loss.is_better(f64::NAN, Some(1.0)));
        let message = key("-ppl").unwrap_err().to_string();
        assert_eq!(message, "metric_key: there is no metric `ppl`; try one of `loss`, `acc`");
    }

    #[test]
    fn values_have_a_place_among_the_best() {
        let loss = MetricKey::parse(Some("-loss"), &["loss"]).unwrap();
        let mut best = Vec::new();
        let mut place = |value| loss.rank(value, &mut best, 3).map_or(0, NonZeroUsize::get);
        let places = [4.0, 5.0, f64::NAN, 4.0, 4.5, 1.0, 4.0].map(&mut place);
        assert_eq!(places, [1, 2, 0, 2, 3, 1, 0]);
        assert_eq!(best, [1.0, 4.0, 4.0]);
    }

    #[test]
    fn without_a_key_the_first_metric_counts() {
        assert_eq!(MetricKey::parse(None, &["loss", "acc", "f1"]).unwrap().name(), "acc");
        let loss = MetricKey::parse(None, &["loss"]).unwrap();
        assert!(loss.name() == "loss" && loss.is_better(1.0, Some(2.0)));
    }
}
