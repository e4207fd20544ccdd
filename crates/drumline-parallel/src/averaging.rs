//! Parameters that are averaged now and then, for ranks that train on their own gradients in between.
//!
//! ```text
//!   parameters ─copy─▶ one flat buffer in the symmetric heap, or on their GPU ─all-reduce─▶ mean ─copy─▶ parameters
//!   periodic       all ranks, every `period` steps
//!   hierarchical   e.g. 8 neighbours every 4 steps, all 16 ranks every 16 steps
//! ```
//! Steps are counted from 0; in the first `warmup_steps` nothing is averaged, since then the gradients still are.

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
    /// Averages `parameters` every `period` steps; called by all ranks of the group.
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

    /// How many steps there were; to be kept in a checkpoint.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Goes on after `step` steps, as a checkpoint says.
    pub fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// To be called after each step of the optimizer, by all ranks. Says whether the parameters were averaged.
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

/// One level of a hierarchy: groups of `group_size` neighbours average every `period` steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AveragingLevel {
    /// In steps.
    pub period: u64,
    /// In ranks; divides the number of all ranks.
    pub group_size: usize,
}

/// Averages parameters over small groups often and over large ones seldom. In a step, only the largest group whose turn it is averages.
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
    /// From small and often to large and seldom; the last level is all ranks. Called by all ranks of the group.
    pub fn new(group: &ProcessGroup, parameters: Vec<Named>, levels: &[AveragingLevel]) -> Result<Self> {
        check_levels(group.size(), levels)?;
        let form = |level: &AveragingLevel| match level.group_size {
            size if size == group.size() => Ok((level.period, group.clone())),
            size => Ok((level.period, subgroup(group, size)?)),
        };
        let levels = levels.iter().map(form).collect::<Result<Vec<_>>>()?;
        Ok(Self { levels, flat: FlatParameters::new(group, parameters)?, warmup_steps: 0, step: 0 })
    }

    /// Averages nothing in the first `steps` steps; periods are counted from step 0 all the same, as PyTorch does.
    #[must_use]
    pub fn with_warmup_steps(mut self, steps: u64) -> Self {
        self.warmup_steps = steps;
        self
    }

    /// How many steps there were; to be kept in a checkpoint.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Goes on after `step` steps, as a checkpoint says.
    pub fn set_step(&mut self, step: u64) {
        self.step = step;
    }

    /// To be called after each step of the optimizer, by all ranks. Returns over how many ranks the parameters were averaged, if they were.
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
    match period {
        0 => Err(ParallelError::Unfit("parameters cannot be averaged every 0 steps; try 4".into())),
        _ => Ok(()),
    }
}

fn check_levels(ranks: usize, levels: &[AveragingLevel]) -> Result {
    levels.iter().try_for_each(|level| check_period(level.period))?;
    let unfit = |what: String| Err(ParallelError::Unfit(what));
    let Some(last) = levels.last() else {
        return unfit("a hierarchy has at least one level, there is none".into());
    };
    if last.group_size != ranks {
        return unfit(format!("the last level has groups of {} ranks; try all {ranks}", last.group_size));
    }
    let grows = |pair: &[AveragingLevel]| {
        let sizes = (pair[0].group_size, pair[1].group_size);
        pair[0].period < pair[1].period && sizes.0 < sizes.1 && sizes.1.is_multiple_of(sizes.0)
    };
    match levels.windows(2).find(|pair| !grows(pair)) {
        Some(pair) => unfit(format!(
            "{:?} must have a longer period than {:?}, and groups that are made of whole groups of it",
            pair[1], pair[0]
        )),
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

    /// Gives each rank of `group` the mean.
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
    fn hierarchies_that_cannot_work_are_refused() {
        assert_eq!(refused(8, &[(2, 2), (4, 4), (8, 8)]), "");
        assert!(refused(8, &[]).contains("at least one level"));
        assert!(refused(8, &[(0, 8)]).contains("every 0 steps"));
        assert!(refused(8, &[(2, 2), (4, 4)]).contains("try all 8"));
        assert!(refused(8, &[(4, 4), (2, 8)]).contains("longer period"));
        assert!(refused(8, &[(2, 3), (4, 8)]).contains("whole groups"));
    }
}
