//! Averages parameters every few steps, for ranks that train on their own gradients in between.
//!
//! ```text
//!   parameters ─copy─▶ one flat buffer in the symmetric heap, or on their GPU ─all-reduce─▶ mean ─copy─▶ parameters
//!   periodic       all ranks, every `period` steps
//!   hierarchical   e.g. 8 neighbours every 4 steps, all 16 ranks every 16 steps
//! ```
//! Steps are counted from 0. In the first `warmup_steps` parameters are not averaged, because gradients still are.

use drumline_comm::{ProcessGroup, ReduceOp};
use drumline_torch::{HeapTensor, Named, tensor_within};
use tch::Tensor;

use crate::error::ParallelError;
use crate::hooks::subgroup;

type Result<T = ()> = std::result::Result<T, ParallelError>;

/// Averages parameters over a group every few steps.
///
/// ```no_run
/// # use drumline_comm::ProcessGroup;
/// # use drumline_parallel::{ParallelError, PeriodicAverager};
/// # use drumline_torch::Named;
/// # fn train(group: &ProcessGroup, parameters: Vec<Named>) -> Result<(), ParallelError> {
/// let mut averager = PeriodicAverager::new(group, parameters, 4)?.with_warmup_steps(100);
/// for step in 0..1000 {
///     // forward, backward, optimizer.step()
///     averager.after_step()?; // averages after the steps 100, 104, 108, …
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PeriodicAverager {
    group: ProcessGroup,
    flat: FlatParameters,
    period: u64,
    warmup_steps: u64,
    step: u64,
}

impl PeriodicAverager {
    /// Averages `parameters` every `period` steps. All ranks of the group call it.
    pub fn new(group: &ProcessGroup, parameters: Vec<Named>, period: u64) -> Result<Self> {
        check_period(period)?;
        let flat = FlatParameters::new(group, parameters)?;
        Ok(Self { group: group.clone(), flat, period, warmup_steps: 0, step: 0 })
    }

    /// Averages nothing in the first `steps` steps; the period is counted from there.
    #[must_use]
    pub fn with_warmup_steps(mut self, steps: u64) -> Self {
        self.warmup_steps = steps;
        self
    }

    /// The number of steps so far; save it in checkpoints.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Resumes after `step` steps, from a checkpoint.
    pub fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// All ranks call it after each step of the optimizer. Returns whether the parameters were averaged.
    #[track_caller]
    pub fn after_step(&mut self) -> Result<bool> {
        let is_due = self.step.checked_sub(self.warmup_steps).is_some_and(|step| step % self.period == 0);
        if is_due {
            self.flat.average(&self.group)?;
        }
        self.step += 1;
        Ok(is_due)
    }
}

/// One level of a hierarchy: groups of `group_size` consecutive ranks average every `period` steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AveragingLevel {
    /// The period in steps.
    pub period: u64,
    /// The number of ranks of a group; it must divide the number of all ranks.
    pub group_size: usize,
}

/// Averages parameters often over small groups and rarely over large ones. In a step, only the largest group that is
/// due averages.
///
/// ```no_run
/// # use drumline_comm::ProcessGroup;
/// # use drumline_parallel::{AveragingLevel, HierarchicalAverager, ParallelError};
/// # use drumline_torch::Named;
/// # fn make(group: &ProcessGroup, parameters: Vec<Named>) -> Result<HierarchicalAverager, ParallelError> {
/// let levels = [AveragingLevel { period: 4, group_size: 8 }, AveragingLevel { period: 16, group_size: 16 }];
/// HierarchicalAverager::new(group, parameters, &levels)
/// # }
/// ```
#[derive(Debug)]
pub struct HierarchicalAverager {
    levels: Vec<(u64, ProcessGroup)>,
    flat: FlatParameters,
    warmup_steps: u64,
    step: u64,
}

impl HierarchicalAverager {
    /// Levels go from small groups with short periods to large groups with long periods; the last one is all ranks. All
    /// ranks of the group call it.
    pub fn new(group: &ProcessGroup, parameters: Vec<Named>, levels: &[AveragingLevel]) -> Result<Self> {
        check_levels(group.size(), levels)?;
        let form = |level: &AveragingLevel| match level.group_size {
            size if size == group.size() => Ok((level.period, group.clone())),
            size => Ok((level.period, subgroup(group, size)?)),
        };
        let levels = levels.iter().map(form).collect::<Result<Vec<_>>>()?;
        Ok(Self { levels, flat: FlatParameters::new(group, parameters)?, warmup_steps: 0, step: 0 })
    }

    /// Averages nothing in the first `steps` steps. Periods are still counted from step 0, as in PyTorch.
    #[must_use]
    pub fn with_warmup_steps(mut self, steps: u64) -> Self {
        self.warmup_steps = steps;
        self
    }

    /// The number of steps so far; save it in checkpoints.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Resumes after `step` steps, from a checkpoint.
    pub fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// All ranks call it after each step of the optimizer. Returns over how many ranks the parameters were averaged, if
    /// they were.
    #[track_caller]
    pub fn after_step(&mut self) -> Result<Option<usize>> {
        let due = self.levels.iter().rev().find(|(period, _)| self.step.is_multiple_of(*period));
        let due = due.filter(|_| self.step >= self.warmup_steps).map(|(_, group)| group);
        if let Some(group) = due {
            self.flat.average(group)?;
        }
        self.step += 1;
        Ok(due.map(ProcessGroup::size))
    }
}

fn check_period(period: u64) -> Result {
    if period == 0 {
        return Err(ParallelError::value("the averaging period", 0, "at least 1 step; try 4"));
    }
    Ok(())
}

fn check_levels(ranks: usize, levels: &[AveragingLevel]) -> Result {
    levels.iter().try_for_each(|level| check_period(level.period))?;
    let Some(last) = levels.last() else {
        return Err(ParallelError::value("the number of averaging levels", 0, "at least 1"));
    };
    if last.group_size != ranks {
        let expected = format!("all {ranks} ranks");
        return Err(ParallelError::value("the last level's group_size", last.group_size, expected));
    }
    let grows = |pair: &[AveragingLevel]| {
        let sizes = (pair[0].group_size, pair[1].group_size);
        pair[0].period < pair[1].period && sizes.0 < sizes.1 && sizes.1.is_multiple_of(sizes.0)
    };
    match levels.windows(2).find(|pair| !grows(pair)) {
        Some(pair) => {
            let what = format!("the level after {:?}", pair[0]);
            let expected = "a longer period, and a group_size that is a multiple of the one before";
            Err(ParallelError::value(what, format!("{:?}", pair[1]), expected))
        }
        None => Ok(()),
    }
}

/// Parameters and their places in flat buffers, one for each kind of element.
#[derive(Debug)]
struct FlatParameters {
    parameters: Vec<Named>,
    flats: Vec<HeapTensor>,
    places: Vec<Tensor>,
}

impl FlatParameters {
    fn new(group: &ProcessGroup, parameters: Vec<Named>) -> Result<Self> {
        let mut lens: Vec<(tch::Kind, usize)> = Vec::new();
        let mut offsets = Vec::new();
        for Named { tensor, .. } in &parameters {
            let known = lens.iter().position(|(kind, _)| *kind == tensor.kind());
            let flat = known.unwrap_or_else(|| {
                lens.push((tensor.kind(), 0));
                lens.len() - 1
            });
            offsets.push((flat, lens[flat].1));
            lens[flat].1 += tensor.numel();
        }
        let device = parameters.first().map_or(tch::Device::Cpu, |named| named.tensor.device());
        let make = |(kind, len): &(tch::Kind, usize)| HeapTensor::zeros_on(group, device, *kind, *len);
        let flats = lens.iter().map(make).collect::<std::result::Result<Vec<_>, _>>()?;
        let place = |(named, (flat, offset)): (&Named, &(usize, usize))| {
            tensor_within(flats[*flat].tensor(), *offset, &named.tensor)
        };
        let places = parameters.iter().zip(&offsets).map(place).collect::<std::result::Result<_, _>>()?;
        Ok(Self { parameters, flats, places })
    }

    /// Replaces the parameters by their mean over `group`.
    #[track_caller]
    fn average(&self, group: &ProcessGroup) -> Result {
        let _no_grad = tch::no_grad_guard();
        let pairs = || self.parameters.iter().zip(&self.places);
        pairs().try_for_each(|(named, place)| place.shallow_clone().f_copy_(&named.tensor))?;
        for flat in &self.flats {
            flat.all_reduce(group, 0..flat.tensor().numel(), ReduceOp::Avg)?;
        }
        Ok(pairs().try_for_each(|(named, place)| named.tensor.shallow_clone().f_copy_(place))?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(ranks: usize, levels: &[(u64, usize)]) -> String {
        let level = |&(period, group_size): &(u64, usize)| AveragingLevel { period, group_size };
        let levels: Vec<_> = levels.iter().map(level).collect();
        check_levels(ranks, &levels).err().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn invalid_hierarchies_are_errors() {
        assert_eq!(refused(8, &[(2, 2), (4, 4), (8, 8)]), "");
        assert!(refused(8, &[]).contains("the number of averaging levels is 0"));
        assert!(refused(8, &[(0, 8)]).contains("the averaging period is 0"));
        assert!(refused(8, &[(2, 2), (4, 4)]).contains("expected all 8 ranks"));
        assert!(refused(8, &[(4, 4), (2, 8)]).contains("longer period"));
        assert!(refused(8, &[(2, 3), (4, 8)]).contains("a multiple of the one before"));
    }
}
