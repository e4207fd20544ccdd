//! `--verify-parity`: runs the first steps on one rank with the whole batch and on all ranks with a part each, and
//! compares the two.
//!
//! ```text
//!   each rank alone  [batch of rank 0 | batch of rank 1 | …] ─▶ DistTrainer ─▶ losses, gradients, weights ─┐ compared
//!   all ranks        the batch of this rank                  ─▶ DistTrainer ─▶ losses, gradients, weights ─┘ on rank 0
//! ```
//! Both runs start with the same weights and use the real trainer: loss, optimizer, precision and accumulation are
//! those of the configuration. Dropout is off: where padding is removed, its masks depend on which rank has a sample.
//! Nothing is written to disk.
//!
//! Three figures are compared. The loss of each step depends on all steps before it. The gradients of the first two
//! steps are compared because an optimizer such as Adam hides a gradient of the wrong size; two steps, because
//! buckets are reordered after the first. Gradient norms are compared where gradients are clipped, for the same reason.
//! The differences of parameters are printed but have no bound: where a gradient is only rounding error, Adam makes a
//! whole step in the direction of its sign.
//!
//! [`Bounds`] defines the bounds. A difference above its bound is an error. The bounds allow rounding, which has a
//! large effect in a network with norms and ReLU: where a value near zero changes its sign, a gradient changes by 1 %.
//! As a reference, ResNet-18 in PyTorch with the same 64 samples in another order differs by 7e-6, 9e-3 and 2e-1 in the
//! gradients of the first three steps, and by 2e-7, 5e-7, 3e-4 and 1e-2 in the losses of the first four. A gradient
//! that is lost or doubled differs by about 1.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::{Context, bail};
use drumline::ProcessGroup;
use drumline::comm::agree_on;
use drumline::engine::Part;
use drumline::optim::Named;
use drumline::trainer::{Callback, CallbackResult, LoadBestModel, TrainState};
use drumline_torch::{buffers, parameters};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use super::job::{Job, say};
use super::parallelism::Parallelism;
use super::train::{Batches, Network, step_trainer};
use super::whole_batch::WholeBatch;
use crate::config::PrecisionKind;
use crate::models::ModelRanks;
use crate::task::{Built, ModelPlace, Place, Start, Task, shared};

/// A figure of a step that both runs record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Figure {
    Loss,
    Gradient,
    /// Measured before clipping.
    GradientNorm,
}

impl Figure {
    fn name(self) -> &'static str {
        match self {
            Self::Loss => "loss",
            Self::Gradient => "gradient",
            Self::GradientNorm => "norm of the gradient",
        }
    }
}

/// The largest relative differences that are allowed.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Bounds {
    /// The bound of the first step's loss. It grows tenfold with each step.
    loss: f64,
    /// The bounds of the gradients of the first steps.
    gradients: [f64; GRADIENTS],
}

/// The number of steps whose gradients are compared.
const GRADIENTS: usize = 2;
/// The largest bound of a loss.
const MOST: f64 = 1e-1;

impl Bounds {
    fn of(precision: PrecisionKind) -> Self {
        match precision {
            PrecisionKind::Fp32 => Self { loss: 1e-4, gradients: [5e-2, 3e-1] },
            PrecisionKind::Fp16 => Self { loss: 1e-3, gradients: [5e-2, 3e-1] },
            PrecisionKind::Bf16 | PrecisionKind::Bf16Master => Self { loss: 1e-2, gradients: [1e-1, 3e-1] },
        }
    }

    /// The bound of a figure at a step (counted from 0), if it has one.
    fn at(self, figure: Figure, step: usize) -> Option<f64> {
        match figure {
            Figure::Loss => Some((self.loss * 10f64.powi(step.min(9) as i32)).min(MOST)),
            Figure::Gradient | Figure::GradientNorm => self.gradients.get(step).copied(),
        }
    }
}

/// The outcome of a run of a few steps.
struct Ran {
    record: Record,
    store: VarStore,
    /// What this rank has of the model, each with its size, if it is cut.
    parts: Vec<(Part, Vec<i64>)>,
}

/// What the trainer's steps have recorded.
#[derive(Default)]
struct Record {
    steps: Vec<Step>,
    /// The gradients of the first [`GRADIENTS`] steps.
    gradients: Vec<Vec<Named>>,
}

#[derive(Debug, Clone, Copy)]
struct Step {
    loss: f64,
    /// The norm of the gradient before clipping, if it is clipped.
    grad_norm: Option<f64>,
}

/// Runs both and prints the differences on rank 0. All ranks return an error if a difference is above its bound.
pub(super) fn verify<T: Task>(job: &Job, mut task: T, seed: u64, steps: u64) -> anyhow::Result<()> {
    task.meet(job, Start::New)?;
    let had_dropout = task.disable_dropout();
    let (task, keys) = (&task, shared(&task));
    let device = job.device(keys.run.device)?;
    let parity = Parity { task, device, seed, steps };
    let alone = job.group.split(Some(job.group.rank() as u32), 0)?;
    let alone = alone.context("a rank is in the group of its colour")?;
    let parallelism = job.agree(Parallelism::of(&job.group, &keys))?;
    let one = job.agree(parity.whole_batch(parallelism.place(0).num_replicas, &alone))?;
    let all = parity.share(&job.group, &parallelism)?;
    if had_dropout {
        job.say("note: dropout is off here, as its masks may depend on which rank has a sample");
    }
    job.on_rank_0(|| {
        let num_replicas = parallelism.num_replicas();
        let ranks = Ranks { count: job.group.size(), num_replicas, batch_size: keys.train.batch_size };
        let (table, differences) = compared(&one, &all, ranks)?;
        say(&table);
        let bounds = Bounds::of(keys.run.precision);
        say(&verdict(&differences, bounds, &note(&all.store, task.unsynced_norms()))?);
        Ok(())
    })
}

/// The settings that both runs share.
struct Parity<'t, T> {
    task: &'t T,
    device: Device,
    seed: u64,
    steps: u64,
}

impl<T: Task> Parity<'_, T> {
    /// Runs on one rank with the batches of all replicas.
    fn whole_batch(&self, num_replicas: usize, alone: &ProcessGroup) -> anyhow::Result<Ran> {
        let data = self.task.train_data(self.device)?.train;
        let sampler = |rank| self.task.sampler(&data, Place { rank, num_replicas }, self.seed);
        let samplers = (0..num_replicas).map(sampler).collect::<anyhow::Result<Vec<_>>>()?;
        let sampler = WholeBatch::new(samplers, shared(self.task).train.batch_size, T::DROP_LAST);
        let batches = Batches { data, sampler: Box::new(sampler), seed: self.seed };
        self.run(alone, &Parallelism::alone(alone)?, batches)
    }

    /// Runs on all ranks, each with its own batches.
    fn share(&self, group: &ProcessGroup, parallelism: &Parallelism) -> anyhow::Result<Ran> {
        let data = agree_on(group, self.task.train_data(self.device))?.train;
        let sampler = self.task.sampler(&data, parallelism.place(group.rank()), self.seed);
        let sampler = agree_on(group, sampler)?;
        self.run(group, parallelism, Batches { data, sampler, seed: self.seed })
    }

    fn run(
        &self,
        group: &ProcessGroup,
        parallelism: &Parallelism,
        batches: Batches<T::Data>,
    ) -> anyhow::Result<Ran> {
        tch::manual_seed(self.seed as i64);
        let store = VarStore::new(self.device);
        let mesh = parallelism.mesh(group)?;
        let ranks = mesh.as_ref().map(ModelRanks::on).unwrap_or_default();
        let cut = parallelism.pipeline(mesh.as_ref(), self.seed);
        let place = ModelPlace { group, device: self.device, ranks: &ranks, pipeline: cut.as_ref() };
        let Built { model, sync_group } = self.task.model(&store, place)?;
        let record = Rc::new(RefCell::new(Record::default()));
        let trainer = step_trainer(self.task, group, Network { model: &*model, store: &store }, batches)?
            .engine(parallelism.engine(sync_group, ranks.tp.parts())?)
            .max_steps(self.steps)
            .callback(Recorder(Rc::clone(&record)));
        let trainer = match &mesh {
            Some(mesh) => trainer.on_mesh(mesh),
            None => trainer,
        };
        let variables = store.variables();
        let sized = |part: Part| {
            let size = variables.get(&part.whole.name).map(Tensor::size)?;
            Some((part, size))
        };
        let parts = ranks.tp.parts().into_iter().filter_map(sized).collect();
        trainer.train(LoadBestModel::No)?;
        Ok(Ran { record: record.take(), store, parts })
    }
}

struct Recorder(Rc<RefCell<Record>>);

impl Callback for Recorder {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() < GRADIENTS as u64 {
            let copy = |named: &Named| {
                let gradient = named.tensor.grad();
                let tensor = gradient.defined().then(|| gradient.detach().copy())?;
                Some(Named { name: named.name.clone(), tensor })
            };
            self.0.borrow_mut().gradients.push(state.parameters().iter().filter_map(copy).collect());
        }
        Ok(())
    }

    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let norm = state.train_metrics().iter().find(|(name, _)| name == "grad_norm");
        let step = Step { loss: state.loss(), grad_norm: norm.map(|(_, norm)| *norm) };
        self.0.borrow_mut().steps.push(step);
        Ok(())
    }
}

/// The number of ranks, how many of them have samples of their own, and the batch size of each of those.
#[derive(Debug, Clone, Copy)]
struct Ranks {
    count: usize,
    num_replicas: usize,
    batch_size: usize,
}

/// The difference of a figure between the two runs, relative to the run on one rank.
#[derive(Debug, Clone, PartialEq)]
struct Difference {
    figure: Figure,
    /// The step, counted from 0.
    step: usize,
    size: f64,
}

/// The table to print, and all differences that have a bound.
fn compared(one: &Ran, all: &Ran, ranks: Ranks) -> anyhow::Result<(String, Vec<Difference>)> {
    let parts = &all.parts;
    let Ranks { count, num_replicas, batch_size } = ranks;
    let whole = num_replicas * batch_size;
    let right = if num_replicas == count {
        format!("{count} ranks x {batch_size}")
    } else {
        format!("{count} ranks")
    };
    let left = format!("1 rank x {whole}");
    let mut text = format!("step  loss, {left:<14}  loss, {right:<14}  relative difference\n");
    let mut differences = Vec::new();
    let mut add = |figure, step, size| differences.push(Difference { figure, step, size });
    for (step, (one, all)) in one.record.steps.iter().zip(&all.record.steps).enumerate() {
        let size = relative(one.loss, all.loss);
        add(Figure::Loss, step, size);
        if let (Some(one), Some(all)) = (one.grad_norm, all.grad_norm) {
            add(Figure::GradientNorm, step, relative(one, all));
        }
        let [one, all] = [one.loss, all.loss];
        text.push_str(&format!("{:4}  {one:<20.9}  {all:<20.9}  {size:.2e}\n", step + 1));
    }
    for (step, (one, all)) in one.record.gradients.iter().zip(&all.record.gradients).enumerate() {
        let (name, size) = furthest(&rows_of(&own_parts(one, parts)?, all), all, Scale::Model);
        add(Figure::Gradient, step, size);
        text.push_str(&format!("gradient of step {}: largest difference {size:.2e} ({name})\n", step + 1));
    }
    let [one_parameters, all_parameters] = [&one.store, &all.store].map(parameters);
    let own = rows_of(&own_parts(&one_parameters, parts)?, &all_parameters);
    let (name, size) = furthest(&own, &all_parameters, Scale::Tensor);
    let steps = one.record.steps.len();
    text.push_str(&format!("parameters after {steps} steps: largest difference {size:.2e} ({name})"));
    Ok((text, differences))
}

/// The parts of whole tensors that rank 0 has.
fn own_parts(whole: &[Named], parts: &[(Part, Vec<i64>)]) -> anyhow::Result<Vec<Named>> {
    let own = |Named { name, tensor }: &Named| {
        let tensor = match parts.iter().find(|(part, _)| part.whole.name == *name) {
            Some((part, size)) => part.of(tensor, size)?,
            None => tensor.shallow_clone(),
        };
        Ok(Named { name: name.clone(), tensor })
    };
    whole.iter().map(own).collect()
}

/// The parts of the gradients that rank 0 holds: all of them, or with ZeRO the first rows of some.
fn rows_of(whole: &[Named], held: &[Named]) -> Vec<Named> {
    let rows = |held: &Named| {
        let Named { name, tensor } = whole.iter().find(|whole| whole.name == held.name)?;
        let is_divided = tensor.dim() > 0 && tensor.size() != held.tensor.size();
        let rows =
            if is_divided { tensor.narrow(0, 0, held.tensor.size()[0]) } else { tensor.shallow_clone() };
        Some(Named { name: name.clone(), tensor: rows })
    };
    held.iter().filter_map(rows).collect()
}

fn relative(one: f64, all: f64) -> f64 {
    (one - all).abs() / one.abs().max(f64::MIN_POSITIVE)
}

/// The value that a difference is divided by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Scale {
    /// The largest absolute value of the same tensor.
    Tensor,
    /// The largest absolute value of all tensors: a gradient that should be zero consists of rounding errors only.
    Model,
}

/// The tensor with the largest difference.
fn furthest(one: &[Named], all: &[Named], scale: Scale) -> (String, f64) {
    let most = |tensor: &Tensor| no_grad(|| tensor.abs().max().to_kind(Kind::Double).double_value(&[]));
    let of_model = one.iter().map(|named| most(&named.tensor)).fold(0.0, f64::max);
    let difference = |(one, all): (&Named, &Named)| {
        let scale = if scale == Scale::Model { of_model } else { most(&one.tensor) };
        let difference = most(&(&one.tensor.detach().to_kind(Kind::Double) - &all.tensor.detach()));
        (one.name.clone(), difference / scale.max(f64::MIN_POSITIVE))
    };
    if one.len() != all.len() {
        return (format!("{} tensors and {}", one.len(), all.len()), f64::NAN);
    }
    let differences = one.iter().zip(all).map(difference);
    differences.max_by(|(_, a), (_, b)| a.total_cmp(b)).unwrap_or_default()
}

/// A hint for the error message. Batch norms that are not synchronised explain a difference.
fn note(store: &VarStore, unsynced: Option<&str>) -> String {
    let has_own = buffers(store).iter().any(|buffer| buffer.name.ends_with("running_mean"));
    match unsynced.filter(|_| has_own) {
        Some(key) => format!("batch norm sees another batch on each side; {key} makes them the same"),
        None => "try fewer ranks to find out where it begins".to_owned(),
    }
}

/// A line of success if every difference is within its bound, an error otherwise. NaN counts as above the bound.
fn verdict(differences: &[Difference], bounds: Bounds, note: &str) -> anyhow::Result<String> {
    let beyond = |one: &Difference| {
        let bound = bounds.at(one.figure, one.step)?;
        let is_within = one.size <= bound;
        (!is_within).then_some((one.figure, one.step, one.size, bound))
    };
    match differences.iter().find_map(beyond) {
        None => {
            let Bounds { loss, gradients: [gradient, ..] } = bounds;
            Ok(format!(
                "the same, but for rounding: at most {loss:.0e} in the first loss, {gradient:.0e} in its gradient"
            ))
        }
        Some((figure, step, size, bound)) => bail!(
            "one rank and all of them differ: the {} of step {} by {size:.2e}, expected at most {bound:.0e}; {note}",
            figure.name(),
            step + 1
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(figure: Figure, step: usize, size: f64) -> anyhow::Result<String> {
        let fine = Difference { figure: Figure::Loss, step: 0, size: 1e-7 };
        let differences = [fine, Difference { figure, step, size }];
        verdict(&differences, Bounds::of(PrecisionKind::Fp32), "a note")
    }

    #[test]
    fn a_difference_above_its_bound_is_an_error() {
        let refused = |figure, step, size| of(figure, step, size).unwrap_err().to_string();
        let said = refused(Figure::Loss, 0, 2e-4);
        assert!(said.contains("the loss of step 1 by 2.00e-4, expected at most 1e-4; a note"), "{said}");
        of(Figure::Loss, 1, 2e-4).unwrap();
        let said = refused(Figure::GradientNorm, 1, 1.0);
        assert!(
            said.contains("the norm of the gradient of step 2 by 1.00e0, expected at most 3e-1"),
            "{said}"
        );
        of(Figure::GradientNorm, 2, 1.0).unwrap();
        assert!(refused(Figure::Gradient, 0, f64::NAN).contains("the gradient of step 1 by NaN"));
        assert!(refused(Figure::Loss, 400, 0.2).contains("expected at most 1e-1"));
    }

    #[test]
    fn a_gradient_of_half_the_samples_is_above_the_bound_in_every_precision() {
        use PrecisionKind::{Bf16, Bf16Master, Fp16, Fp32};
        for (precision, step) in
            [Fp32, Fp16, Bf16, Bf16Master].into_iter().flat_map(|one| [(one, 0), (one, 1)])
        {
            let halved = [Difference { figure: Figure::Gradient, step, size: 0.5 }];
            verdict(&halved, Bounds::of(precision), "").unwrap_err();
        }
    }

    #[test]
    fn a_doubled_gradient_differs_and_a_rounded_one_does_not() {
        let named =
            |name: &str, values: &[f32]| Named { name: name.into(), tensor: Tensor::from_slice(values) };
        let one = [named("weight", &[1.0, -2.0]), named("bias", &[1e-9])];
        let rounded = [named("weight", &[1.0, -2.0]), named("bias", &[-1e-9])];
        let doubled = [named("weight", &[2.0, -4.0]), named("bias", &[2e-9])];
        assert_eq!(furthest(&one, &doubled, Scale::Model), ("weight".to_owned(), 1.0));
        assert!(furthest(&one, &rounded, Scale::Model).1 < 1e-8);
        assert!(furthest(&one, &rounded, Scale::Tensor).1 > 1.0, "control");
        assert!(furthest(&one, &doubled[..1], Scale::Model).1.is_nan());
    }
}
