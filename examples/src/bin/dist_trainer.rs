//! fastNLP's distributed training script: rank 0 prepares the data, two kinds of callbacks, one trainer.
//!
//! ```text
//!   drumline run --nproc-per-node 2 target/release/dist_trainer --epochs 3 --update 2
//! ```
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use drumline::data::{Cause, ImageBatch};
use drumline::metrics::TopK;
use drumline::optim::{AdamOptions, AdamW, parameters};
use drumline::schedule::Warmup;
use drumline::tch::nn::VarStore;
use drumline::trainer::{Callback, CallbackResult, CrossEntropy, DistTrainer, LoadBestModel, TrainState};
use drumline::{LogOptions, ProcessGroup, local_device, main_first};
use drumline_examples::{Args, FitLog};
use drumline_zoo::data::{Cifar, Split};
use drumline_zoo::models::{Model, ModelOptions, build};
use drumline_zoo::transforms::Transform;

/// Train a network on CIFAR-10 by DistTrainer, in the processes that a launcher has started
#[derive(Parser)]
struct Options {
    #[command(flatten)]
    args: Args,
    /// Learning rate
    #[arg(long, default_value_t = 2e-3, value_name = "LR")]
    lr: f64,
    /// Steps in which the learning rate grows
    #[arg(long, default_value_t = 20, value_name = "N")]
    warmup: u64,
    /// Batches of a step on each rank
    #[arg(long, default_value_t = 1, value_name = "N")]
    update: usize,
    /// Folder of checkpoints and of the log
    #[arg(long, default_value = "save", value_name = "DIR")]
    save: PathBuf,
}

/// On all ranks: stops after this many steps.
struct Enough(usize);

impl Callback for Enough {
    fn on_batch_end(&mut self, state: &mut TrainState) -> CallbackResult {
        if state.step() >= self.0 as u64 {
            state.request_stop("--steps");
        }
        Ok(())
    }
}

fn main() -> ExitCode {
    drumline::exit_code(train(&Options::parse()))
}

fn train(options: &Options) -> anyhow::Result<()> {
    // set up logging and the group; rank 0 shows INFO, the other ranks WARN
    drumline::init_logging(LogOptions::default())?;
    let group = ProcessGroup::from_env()?;

    // read the data: rank 0 downloads and processes it, the others wait and then read the result
    let (train_set, dev_set) = main_first(&group, "preparing the data", || processed_data(options))?;
    let store = VarStore::new(local_device(&group));
    let model = model(options, &store)?;

    // the trainer; each rank creates the same one
    let optimizer = AdamW::new(parameters(&store), AdamOptions { lr: options.lr, ..Default::default() })?;
    let trainer = DistTrainer::<_, ImageBatch>::new(&group, &model, &store, train_set)
        .save_path(&options.save)
        .dev_data(dev_set)
        .loss(CrossEntropy::default())
        .metric("acc", TopK::new(1))
        .metric_key("acc")
        .optimizer(optimizer)
        .schedule(Warmup::steps(options.warmup))
        .callback(Enough(options.args.steps)) // on all ranks: what changes the training
        .master_callback(FitLog::in_folder(&options.save)) // on rank 0: what writes
        .batch_size_per_gpu(options.args.batch_size)
        .update_every(options.update)
        .n_epochs(options.args.epochs)
        .use_tqdm(true);
    let is_master = trainer.is_master();
    let outcome = trainer.train(LoadBestModel::Yes)?;
    if is_master {
        let (best, step) = (outcome.best_metric.unwrap_or(f64::NAN), outcome.best_step.unwrap_or(0));
        println!("best acc: {best:.4} after step {step} of {}", outcome.steps);
    }
    Ok(())
}

fn processed_data(options: &Options) -> Result<(Cifar, Cifar), Cause> {
    let folder = options.args.data()?;
    let train = Cifar::open(&folder, Split::Train, Transform::cifar_train())?;
    Ok((train, Cifar::open(&folder, Split::Test, Transform::cifar_test())?))
}

fn model(options: &Options, store: &VarStore) -> anyhow::Result<Model> {
    Ok(build(&options.args.arch, &store.root(), &ModelOptions { num_classes: 10, ..Default::default() })?)
}
