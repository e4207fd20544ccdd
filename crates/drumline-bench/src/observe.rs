//! `drumline-bench observe`: the steps that `cargo xtask bench observe` times. One job trains by turns with a loop written by hand, with a bare
//! trainer, and with all that `drumline train` has to watch it; so the machine is the same for all three.

use std::cell::RefCell;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::ensure;
use clap::Args;
use drumline::data::{Dataset, ImageBatch, Sample, SampleError};
use drumline::optim::{Optimizer, Sgd, SgdOptions, parameters};
use drumline::schedule::At;
use drumline::trainer::{
    Callback, CallbackResult, CrossEntropy, DistTrainer, EventFile, Every, LoadBestModel, RankFiles,
    TensorBoard, TrainState,
};
use drumline::{Ddp, DdpOptions, ProcessGroup, ReduceOp};
use drumline_observe::bar::Progress;
use drumline_observe::status::Memory;
use drumline_torch::{flush_denormals, keep_freed_memory};
use serde_json::json;
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Tensor};

use drumline_zoo::driver::Report;
use drumline_zoo::formula::{Samples, fill, samples};
use drumline_zoo::images::ImageConfig;
use drumline_zoo::models::{self, Model, ModelOptions};
use drumline_zoo::percent::Percent;

/// Steps of a turn before those that are timed.
const WARM_UP: usize = 3;
const LR: f64 = 0.01;

/// Time steps with and without observers
#[derive(Debug, Args)]
pub(super) struct ObserveArgs {
    /// Name of the network
    #[arg(long, default_value = "resnet18")]
    arch: String,
    /// Images of a rank's batch
    #[arg(long, default_value_t = 32)]
    batch: usize,
    /// Timed steps of a turn
    #[arg(long, default_value_t = 20)]
    steps: usize,
    /// Turns of each
    #[arg(long, default_value_t = 5)]
    turns: usize,
    /// Folder for what observers write
    #[arg(long)]
    out_dir: std::path::PathBuf,
}

/// Who makes the steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Variant {
    /// A loop on `Ddp`.
    Loop,
    /// The trainer, without callbacks.
    Bare,
    /// The trainer, with all that `drumline train` has.
    Observed,
}

impl Variant {
    const ALL: [Self; 3] = [Self::Loop, Self::Bare, Self::Observed];

    fn name(self) -> &'static str {
        match self {
            Self::Loop => "loop",
            Self::Bare => "bare",
            Self::Observed => "observed",
        }
    }
}

/// What a turn gave.
struct Turn {
    /// The slowest rank's steps, in milliseconds.
    times: Vec<f64>,
    /// After the last step, the mean over ranks.
    loss: f64,
    /// What the process had gained in bytes when it ended.
    gained: i64,
}

/// Trains by turns, and rank 0 prints a JSON line for each.
pub(super) fn run(args: &ObserveArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    tch::set_num_threads(1);
    let bench = Bench::new(args)?;
    let mut losses: Option<f64> = None;
    for turn in 0..args.turns {
        for place in 0..Variant::ALL.len() {
            let variant = Variant::ALL[(turn + place) % Variant::ALL.len()];
            let Turn { times, loss, gained } = bench.turn(variant)?;
            let first = *losses.get_or_insert(loss);
            ensure!((loss - first).abs() <= 1e-4 * first.abs(), "{variant:?}: loss {loss}, expected {first}");
            if bench.group.rank() == 0 {
                println!(
                    "{}",
                    json!({"way": variant.name(), "turn": turn, "times_ms": times, "gained_bytes": gained})
                );
            }
        }
    }
    Ok(())
}

struct Bench<'a> {
    args: &'a ObserveArgs,
    group: ProcessGroup,
    store: VarStore,
    net: Model,
}

impl<'a> Bench<'a> {
    fn new(args: &'a ObserveArgs) -> anyhow::Result<Self> {
        let store = VarStore::new(Device::Cpu);
        let options = ModelOptions { num_classes: 10, ..ModelOptions::default() };
        let net = models::build(&args.arch, &store.root(), &options)?;
        Ok(Self { args, group: ProcessGroup::from_env()?, store, net })
    }

    fn turn(&self, variant: Variant) -> anyhow::Result<Turn> {
        fill(&self.store);
        let before = memory();
        let (mut ends, loss) = match variant {
            Variant::Loop => self.by_hand()?,
            Variant::Bare => self.by_trainer(|trainer| trainer)?,
            Variant::Observed => self.by_trainer(|trainer| observed(trainer, &self.args.out_dir))?,
        };
        let gained = memory() - before;
        ends.drain(..WARM_UP);
        let mut times: Vec<_> = ends.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).collect();
        self.group.all_reduce(&mut times, ReduceOp::Max)?;
        let mut loss = [loss];
        self.group.all_reduce(&mut loss, ReduceOp::Avg)?;
        Ok(Turn { times, loss: loss[0], gained })
    }

    fn data(&self) -> Fixed {
        let count = self.args.batch;
        let first = (self.group.rank() * count) as i64;
        let batch = samples(Samples { first, count: count as i64, edge: 32 });
        Fixed { steps: self.num_steps(), world_size: self.group.size(), count, batch: Mutex::new(batch) }
    }

    fn num_steps(&self) -> usize {
        WARM_UP + 1 + self.args.steps
    }

    fn sgd(&self) -> anyhow::Result<Sgd> {
        let options = SgdOptions { lr: LR, momentum: 0.9, weight_decay: 5e-5, ..SgdOptions::default() };
        Ok(Sgd::new(parameters(&self.store), options)?)
    }

    /// When each step ended, and the last loss.
    fn by_hand(&self) -> anyhow::Result<(Vec<Instant>, f64)> {
        let (data, mut optimizer) = (self.data(), self.sgd()?);
        let replica = Ddp::new(&self.net, &self.store, &self.group, DdpOptions::default())?;
        let (mut ends, mut last) = (Vec::new(), 0.0);
        for _ in 0..self.num_steps() {
            let (images, labels) = data.tensors();
            optimizer.zero_grad()?;
            let output = replica.forward_with(|net| net.forward_t(&images, true))?;
            let loss = output.cross_entropy_for_logits(&labels);
            replica.backward(&loss)?;
            optimizer.step()?;
            last = loss.double_value(&[]);
            ends.push(Instant::now());
        }
        Ok((ends, last))
    }

    fn by_trainer<'b>(
        &'b self,
        with: impl FnOnce(DistTrainer<'b, Model, ImageBatch>) -> DistTrainer<'b, Model, ImageBatch>,
    ) -> anyhow::Result<(Vec<Instant>, f64)> {
        let ends = RefCell::new((Vec::new(), 0.0));
        let trainer = DistTrainer::new(&self.group, &self.net, &self.store, self.data())
            .loss(CrossEntropy::default())
            .optimizer(self.sgd()?)
            .batch_size_per_gpu(self.args.batch)
            .num_workers(0)
            .validate_every(Every::Never)
            .print_every(0);
        // Last, so that what the others do is within the step.
        let trainer = with(trainer).callback(StopWatch(&ends));
        trainer.train(LoadBestModel::No)?;
        Ok(ends.into_inner())
    }
}

/// What `drumline train` has.
fn observed<'a>(
    trainer: DistTrainer<'a, Model, ImageBatch>,
    folder: &Path,
) -> DistTrainer<'a, Model, ImageBatch> {
    let config = ImageConfig::default();
    let progress = Progress::lines(config.shared.train.print_freq as u64);
    trainer
        .train_metric("acc1", Percent::of_top(1))
        .schedule(|_: At| LR)
        .callback(RankFiles::in_folder(folder))
        .master_callback(Report::of_images(progress, config.shared.test.print_freq as u64))
        .master_callback(EventFile::in_folder(folder))
        .master_callback(TensorBoard::in_folder(folder.join("tensorboard")))
}

/// Notes when steps end: the next one's batch is taken right after.
struct StopWatch<'a>(&'a RefCell<(Vec<Instant>, f64)>);

impl Callback for StopWatch<'_> {
    fn on_batch_begin(&mut self, state: &mut TrainState) -> CallbackResult {
        let mut ends = self.0.borrow_mut();
        if state.step() > 0 {
            ends.0.push(Instant::now());
        }
        Ok(())
    }

    fn on_train_end(&mut self, state: &mut TrainState) -> CallbackResult {
        let mut ends = self.0.borrow_mut();
        ends.0.push(Instant::now());
        ends.1 = state.loss();
        Ok(())
    }
}

/// The same batch of a rank at each step: nothing is loaded.
struct Fixed {
    steps: usize,
    world_size: usize,
    count: usize,
    batch: Mutex<(Tensor, Tensor)>,
}

impl Fixed {
    fn tensors(&self) -> (Tensor, Tensor) {
        let batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        (batch.0.shallow_clone(), batch.1.shallow_clone())
    }
}

impl Dataset for Fixed {
    type Batch = ImageBatch;

    fn len(&self) -> usize {
        self.steps * self.world_size * self.count
    }

    fn batch(&self, samples: &[Sample]) -> Result<ImageBatch, SampleError> {
        let (images, labels) = self.tensors();
        Ok(ImageBatch { images, labels, indices: samples.iter().map(|sample| sample.index).collect() })
    }
}

fn memory() -> i64 {
    Memory::of_this_process().map_or(0, |memory| memory.used as i64)
}
