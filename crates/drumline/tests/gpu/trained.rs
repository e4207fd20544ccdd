//! A small training on a GPU, and what is seen of its steps.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use drumline::data::{Dataset, Sample, SampleError};
use drumline::engine::{EngineOptions, Offload, Place, ShardOptions, Stage, SyncBatchNorm, SyncGroup};
use drumline::optim::{AdamOptions, AdamW, DynamicScale, Named, ScalePolicy, Sgd, SgdOptions, parameters};
use drumline::schedule::{At, LrPolicy, LrSchedule, Schedule};
use drumline::tch::nn::{Linear, Module, ModuleT, VarStore, linear};
use drumline::tch::{Device, Kind, Tensor};
use drumline::torch::TorchError;
use drumline::trainer::{
    Callback, CallbackResult, CrossEntropy, DistTrainer, Every, LoadBestModel, Precision, TrainState,
};
use drumline::{DdpOptions, ProcessGroup};
use drumline_torch::cuda;
use drumline_torch::{FunctionError, checkpoint, dropout, keep, selective_checkpoint};

pub(super) const GPU: Device = Device::Cuda(0);
/// Enough for all that a rank alone does.
pub(super) const BRIEF: Duration = Duration::from_secs(60);
/// Steps that are made as they are before one is recorded.
pub(super) const WARM_UPS: usize = 3;

const CLASSES: i64 = 3;
const HIDDEN: i64 = 32;

/// Joins the job, with the GPU opened before anything asks for it.
pub(super) fn join() -> anyhow::Result<ProcessGroup> {
    cuda::open()?;
    Ok(ProcessGroup::from_env()?)
}

/// What the first layer keeps for backward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    All,
    /// Its input.
    Input,
    /// Its input, and the result of its product.
    Product,
}

/// Which training.
#[derive(Debug, Clone, Copy)]
pub(super) struct Case {
    pub(super) graphs: bool,
    pub(super) workers: usize,
    pub(super) pin_memory: bool,
    /// Samples of an epoch, and numbers of a sample.
    pub(super) data: (usize, i64),
    pub(super) batch_size: usize,
    pub(super) update_every: usize,
    pub(super) epochs: u64,
    pub(super) precision: Precision,
    pub(super) adam: bool,
    pub(super) reduces_alone: bool,
    /// Whether forward reads a value, which cannot be recorded.
    pub(super) reads: bool,
    /// Whether forward wants more memory than there is.
    pub(super) fills: bool,
    /// Whether ranks share the statistics of a norm.
    pub(super) syncs: bool,
    /// The probability of dropout.
    pub(super) dropout: f64,
    pub(super) kept: Kept,
    /// The stage of ZeRO, which a single rank goes through as if there were several. The model is then created on the CPU.
    pub(super) zero: Option<Stage>,
    /// Whether the schedule cycles the momentum, and ends that before the training ends.
    pub(super) cycles: bool,
    /// Whether a rank without ZeRO has the optimizer's state in host memory.
    pub(super) offloads: bool,
}

impl Case {
    /// For constants.
    pub(super) const DEFAULT: Self = Self {
        graphs: true,
        workers: 1,
        pin_memory: true,
        data: (64, 16),
        batch_size: 16,
        update_every: 1,
        epochs: 6,
        precision: Precision::F32,
        adam: false,
        reduces_alone: false,
        reads: false,
        fills: false,
        syncs: false,
        dropout: 0.0,
        kept: Kept::All,
        zero: None,
        cycles: false,
        offloads: false,
    };
}

impl Default for Case {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// What a step has come to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Step {
    pub(super) loss: f64,
    pub(super) has_overflowed: bool,
    pub(super) scale: Option<f64>,
}

/// What a training has come to.
#[derive(Debug)]
pub(super) struct Trained {
    pub(super) steps: Vec<Step>,
    /// How often forward was called.
    pub(super) forwards: usize,
    /// The sum of all weights.
    pub(super) weights: f64,
}

/// Samples that all differ, in batches of pairs.
pub(super) struct Waves {
    pub(super) len: usize,
    pub(super) width: i64,
}

impl Dataset for Waves {
    type Batch = (Tensor, Tensor);

    fn len(&self) -> usize {
        self.len
    }

    fn batch(&self, samples: &[Sample]) -> Result<Self::Batch, SampleError> {
        let places: Vec<f32> = samples.iter().map(|sample| sample.index as f32 * 1.3).collect();
        let classes: Vec<i64> =
            samples.iter().map(|sample| (sample.index * 7 % 5) as i64 % CLASSES).collect();
        let waves = Tensor::arange(self.width, (Kind::Float, Device::Cpu)) * 0.9;
        let input = (Tensor::from_slice(&places).unsqueeze(1) + waves.unsqueeze(0)).sin();
        Ok((input, Tensor::from_slice(&classes)))
    }

    fn pin_memory(&self, (input, target): Self::Batch) -> Result<Self::Batch, TorchError> {
        Ok((cuda::pinned(&input)?, cuda::pinned(&target)?))
    }
}

/// Two layers whose weights are always the same at first.
#[derive(Debug)]
struct Net {
    first: Linear,
    second: Linear,
    norm: Option<SyncBatchNorm>,
    forwards: AtomicUsize,
    case: Case,
}

impl Net {
    fn new(store: &VarStore, case: Case, sync: Option<&SyncGroup>) -> Self {
        let layer = |name: &str, from, to| linear(store.root() / name, from, to, Default::default());
        let (first, second) = (layer("first", case.data.1, HIDDEN), layer("second", HIDDEN, CLASSES));
        let norm = |sync| SyncBatchNorm::new(store.root() / "norm", HIDDEN, Default::default(), sync);
        let norm = sync.map(norm);
        for (place, Named { tensor, .. }) in parameters(store).iter().enumerate() {
            let values = Tensor::arange(tensor.numel() as i64, (Kind::Float, Device::Cpu)) * 0.7;
            let bound = 1.0 / (tensor.size()[tensor.dim() - 1] as f64).sqrt();
            let values = ((values + place as f64).sin() * bound).view_as(tensor);
            drumline::tch::no_grad(|| tensor.shallow_clone().copy_(&values));
        }
        Self { first, second, norm, forwards: AtomicUsize::new(0), case }
    }
}

impl Net {
    /// The first layer, in a checkpoint unless all is kept.
    fn hidden(&self, input: &Tensor) -> Tensor {
        let (weight, bias) =
            (self.first.ws.shallow_clone(), self.first.bs.as_ref().map(Tensor::shallow_clone));
        let p = self.case.dropout;
        let layer = move |xs: &[Tensor]| {
            let product = keep(&[&xs[0]], || Ok(xs[0].f_linear(&weight, bias.as_ref())?))?;
            Ok(dropout(&product.f_tanh()?, p)?)
        };
        match self.case.kept {
            Kept::All => {
                layer(&[input.shallow_clone()]).map_err(|error: FunctionError| error.to_string()).unwrap()
            }
            Kept::Input => checkpoint(layer, &[input]).unwrap(),
            Kept::Product => selective_checkpoint(layer, &[input]).unwrap(),
        }
    }
}

impl Module for Net {
    fn forward(&self, input: &Tensor) -> Tensor {
        self.forwards.fetch_add(1, Ordering::Relaxed);
        let hidden = self.hidden(input);
        let hidden =
            self.norm.as_ref().map_or_else(|| hidden.shallow_clone(), |norm| norm.forward_t(&hidden, true));
        if self.case.reads {
            assert!(hidden.double_value(&[0, 0]).is_finite());
        }
        if self.case.fills {
            let _ = Tensor::zeros([1 << 40], (Kind::Float, GPU));
        }
        self.second.forward(&hidden)
    }
}

/// Changes gradients between the graphs.
struct Softer;

impl Callback for Softer {
    fn on_backward_end(&mut self, state: &mut TrainState) -> CallbackResult {
        for Named { tensor, .. } in state.parameters().iter().filter(|_| !state.has_overflowed()) {
            let _ = drumline::tch::no_grad(|| tensor.grad().g_mul_scalar_(0.9));
        }
        Ok(())
    }
}

struct Noting(Arc<Mutex<Vec<Step>>>);

impl Callback for Noting {
    fn on_step_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let scale = state.train_metrics().iter().find(|(name, _)| name == "loss_scale");
        self.0.lock().unwrap().push(Step {
            loss: state.loss(),
            has_overflowed: state.has_overflowed(),
            scale: scale.map(|(_, scale)| *scale),
        });
        Ok(())
    }
}

/// A scale at which the first steps overflow, more of them than are made before one is recorded; later each fourth or
/// so does.
const HIGH: ScalePolicy = ScalePolicy::Dynamic(DynamicScale {
    init_scale: 16_777_216.0,
    growth_factor: 2.0,
    backoff_factor: 0.5,
    growth_interval: 3,
});

/// Learning rates and momenta of 16 steps, and the last ones of the cycle afterwards.
const CYCLE: &str =
    r#"{"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 8, "decay_step_size": 0}"#;

/// Trains from the start. All ranks call it.
pub(super) fn train(group: &ProcessGroup, case: Case) -> anyhow::Result<Trained> {
    let data = Waves { len: case.data.0, width: case.data.1 };
    train_on(group, case, data, Softer)
}

/// The same on other data, with a callback that comes before the one that looks.
pub(super) fn train_on(
    group: &ProcessGroup,
    case: Case,
    data: impl Dataset<Batch = (Tensor, Tensor)> + 'static,
    callback: impl Callback,
) -> anyhow::Result<Trained> {
    let store = VarStore::new(if case.zero.is_some() { Device::Cpu } else { GPU });
    let sync_group = case.syncs.then(|| SyncGroup::new(group)).transpose()?;
    let (net, noted) = (Net::new(&store, case, sync_group.as_ref()), Arc::default());
    let trainer = DistTrainer::new(group, &net, &store, data).loss(CrossEntropy::default());
    let trainer = trainer.device(GPU).print_every(0).validate_every(Every::Never).seed(5);
    let trainer =
        trainer.batch_size_per_gpu(case.batch_size).update_every(case.update_every).n_epochs(case.epochs);
    let trainer = trainer.cuda_graphs(case.graphs).num_workers(case.workers).pin_memory(case.pin_memory);
    let trainer = trainer.precision(case.precision).loss_scale(HIGH);
    let options: Box<dyn EngineOptions> = match case.zero {
        Some(stage) => {
            ShardOptions { shards_alone: true, keep_gathered: 100, sync_group, ..ShardOptions::new(stage) }
                .into()
        }
        None if case.offloads => {
            let offload = Offload { optimizer: Place::Host, ..Offload::default() };
            ShardOptions { offload, ..ShardOptions::new(Stage::Zero0) }.into()
        }
        None => DdpOptions { reduces_alone: case.reduces_alone, sync_group, ..DdpOptions::default() }.into(),
    };
    let lr = if case.adam { 0.01 } else { 0.1 };
    let changing = move |at: At| lr * (1.0 + 0.5 * (at.step as f64).sin());
    let trainer = trainer.engine(options).clip_norm(0.5);
    let cycle = LrSchedule::new(lr, LrPolicy::OneCycle(serde_json::from_str(CYCLE)?))?;
    let schedule: Box<dyn Schedule> = if case.cycles { Box::new(cycle) } else { Box::new(changing) };
    let trainer = trainer.schedule(schedule).callback(callback);
    let trainer = trainer.callback(Noting(Arc::clone(&noted)));
    let trainer = if case.adam {
        trainer.optimizer(AdamW::new(parameters(&store), AdamOptions { lr, ..Default::default() })?)
    } else {
        let options = SgdOptions { lr, momentum: 0.9, ..Default::default() };
        trainer.optimizer(Sgd::new(parameters(&store), options)?)
    };
    trainer.train(LoadBestModel::No)?;
    let sum = |named: &Named| named.tensor.sum(Kind::Double).double_value(&[]);
    // In stage 3 they are divided.
    let weights = if case.zero.is_some() { 0.0 } else { parameters(&store).iter().map(sum).sum() };
    let steps = noted.lock().unwrap().clone();
    Ok(Trained { steps, forwards: net.forwards.load(Ordering::Relaxed), weights })
}

/// The steps of both trainings have the same losses, and have learnt.
#[track_caller]
pub(super) fn assert_same_losses(one: &Trained, other: &Trained, tolerance: f64) {
    assert_eq!(one.steps.len(), other.steps.len());
    for (step, (one, other)) in one.steps.iter().zip(&other.steps).enumerate() {
        assert!((one.loss - other.loss).abs() < tolerance, "step {}: {one:?}, {other:?}", step + 1);
    }
    assert!((one.weights - other.weights).abs() < 100.0 * tolerance, "{} {}", one.weights, other.weights);
    let mean = |steps: &[Step]| steps.iter().map(|step| step.loss).sum::<f64>() / steps.len() as f64;
    let part = one.steps.len() / 3;
    let (begin, end) = (mean(&one.steps[..part]), mean(&one.steps[one.steps.len() - part..]));
    assert!(end < begin, "it learns: {begin} {end}");
}
