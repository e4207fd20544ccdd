//! `drumline-train train`: from a configuration to a trained network, with [`DistTrainer`].

use drumline::checkpoint::Loaded;
use drumline::trainer::{
    Checkpoint, CrossEntropy, DistTrainer, End, EventFile, Every, LearningRate, LoadBestModel, RankFiles,
    TensorBoard, TrainOutcome,
};
use drumline::{At, ImageBatch, SamplerPosition, Schedule};
use drumline_observe::bar::Progress;
use drumline_torch::{Determinism, flush_denormals, keep_freed_memory, use_deterministic_algorithms};
use tch::nn::VarStore;

use super::args::TrainArgs;
use super::callbacks::{FiniteLoss, SaveConfig};
use super::checked::{CheckedTraining, check_writable, device};
use super::ending::Stopped;
use super::job::Job;
use super::parity;
use super::pieces::{self, Percent};
use super::shown::Shown;
use crate::config::{Config, table};
use crate::models::Model;

/// Steps that are not traced: memory is new, and files are read for the first time.
const WARM_UP: u64 = 5;

/// Trains as the command line says; an error if that was not possible.
pub(super) fn run(args: &TrainArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    let checked = CheckedTraining::new(&args.run);
    let job = Job::join()?;
    let checked = job.agree(checked)?;
    let config = &checked.run.config;
    job.say_hello();
    let seed = job.seed(config.run.rng_seed)?;
    if let Some(steps) = args.verify_parity {
        return parity::verify(&job, &checked, seed, steps);
    }
    job.agree(if job.is_first() { check_writable("OUT_DIR", &config.run.out_dir) } else { Ok(()) })?;
    let found = find_checkpoint(&job, config)?;
    let progress = progress(&job, config);
    if let Some(found) = found.as_ref().filter(|found| is_over(found, config)) {
        progress.say(&nothing_left(found, config));
        return Ok(());
    }
    let seed = seed_of(config, seed, found.as_ref());
    train(&job, &checked, seed, Begin { found, progress })
}

/// What a training begins with.
struct Begin {
    found: Option<Loaded>,
    progress: Progress,
}

fn train(job: &Job, checked: &CheckedTraining, seed: u64, begin: Begin) -> anyhow::Result<()> {
    let config = &checked.run.config;
    let device = job.agree(device(config.run.device, job.local_rank))?;
    if config.cudnn.deterministic {
        use_deterministic_algorithms(Determinism::Require)?;
    }
    tch::Cuda::cudnn_set_benchmark(config.cudnn.benchmark);
    tch::manual_seed(seed as i64);
    let store = VarStore::new(device);
    let (net, options) = job.agree(pieces::model(config, &store, &job.group))?;
    let trainer = job.agree(trainer(job, checked, (&net, &store), seed))?.ddp_options(options);
    let log = job.agree(begin.progress.log_to(&config.run.out_dir).map_err(Into::into));
    let progress = log?;
    let trainer = observed(trainer, config, progress.clone());
    let trainer = match begin.found {
        Some(found) => trainer.resume_with(job.agree(pieces::with_optimizer(found, config, &store))?),
        None => trainer,
    };
    let outcome = trainer.train(LoadBestModel::No)?;
    progress.say(&last_words(config, &outcome));
    match (job.signal_that_ended_it(), outcome.end) {
        (Some(signal), End::Stopped { .. }) => Err(Stopped { signal }.into()),
        _ => Ok(()),
    }
}

type ImageTrainer<'a> = DistTrainer<'a, Model, ImageBatch>;

/// The trainer that the configuration asks for, by the rank alone.
fn trainer<'a>(
    job: &Job,
    checked: &CheckedTraining,
    (net, store): (&'a Model, &'a VarStore),
    seed: u64,
) -> anyhow::Result<ImageTrainer<'a>> {
    let config = &checked.run.config;
    let (optim, train) = (&config.optim, &config.train);
    let images = pieces::train_images(checked)?;
    let sampler = pieces::train_sampler(&images, config, job.place(), seed)?;
    let schedule = pieces::schedule(optim)?;
    // Distribuuuu sets the learning rate once an epoch.
    let schedule = move |at: At| schedule.lr(At { epoch: at.epoch.floor(), ..at });
    let mut trainer = DistTrainer::new(&job.group, net, store, images)
        .dev_data(pieces::test_images(&checked.run)?)
        .loss(CrossEntropy::default())
        .optimizer(pieces::sgd(store, optim)?)
        .sampler(sampler)
        .stop_request(job.stop.clone())
        .train_metric("acc1", Percent::of_top(1))
        .metric("acc1", Percent::of_top(1))
        .callback(LearningRate::by(schedule))
        .callback(FiniteLoss(config.clone()))
        .callback(Checkpoint::every(Every::Epochs(1)))
        .batch_size_per_gpu(train.batch_size)
        .dev_batch_size(config.test.batch_size)
        .update_every(train.accumulate)
        .n_epochs(optim.max_epoch)
        .num_workers(train.workers)
        .pin_memory(train.pin_memory)
        .seed(seed)
        .print_every(0)
        .save_path(pieces::checkpoints(config).dir())
        .config(table::to_json(config));
    let k = train.topk.min(config.model.num_classes);
    if k > 1 {
        trainer = trainer.metric(format!("acc{k}"), Percent::of_top(k));
    }
    Ok(match train.max_steps {
        Some(most) => trainer.max_steps(most),
        None => trainer,
    })
}

/// With those that show and write what happens.
fn observed<'a>(trainer: ImageTrainer<'a>, config: &Config, progress: Progress) -> ImageTrainer<'a> {
    let folder = &config.run.out_dir;
    let trainer = trainer
        .callback(RankFiles::in_folder(folder))
        .master_callback(SaveConfig(config.clone()))
        .master_callback(Shown::new(progress, config))
        .master_callback(EventFile::in_folder(folder));
    let trainer = match config.train.tensorboard {
        true => trainer.master_callback(TensorBoard::in_folder(folder.join("tensorboard"))),
        false => trainer,
    };
    trainer.trace_steps(WARM_UP..WARM_UP + config.train.trace_steps, folder)
}

/// The last checkpoint, if there is one and it is wanted.
fn find_checkpoint(job: &Job, config: &Config) -> anyhow::Result<Option<Loaded>> {
    match config.train.auto_resume {
        true => Ok(pieces::checkpoints(config).load_latest(&job.group)?),
        false => Ok(None),
    }
}

/// Whether the checkpoint is that of the last step.
fn is_over(found: &Loaded, config: &Config) -> bool {
    found.state.epoch >= config.optim.max_epoch
        || config.train.max_steps.is_some_and(|most| found.state.step >= most)
}

fn nothing_left(found: &Loaded, config: &Config) -> String {
    let (step, epoch, best) = (found.state.step, found.state.epoch, found.state.best.unwrap_or(0.0));
    format!(
        "[resume] == nothing left to do after step {step}, {epoch} epochs; best Acc@1 {best:.3} in {}; \
         try a larger OPTIM.MAX_EPOCH or TRAIN.MAX_STEPS, or another OUT_DIR ==",
        config.run.out_dir.display()
    )
}

/// A run that was given no seed goes on with the one that it drew.
fn seed_of(config: &Config, seed: u64, found: Option<&Loaded>) -> u64 {
    let saved = found.and_then(|found| serde_json::from_value(found.state.sampler.clone()).ok());
    match (config.run.rng_seed, saved) {
        (None, Some(SamplerPosition { seed, .. })) => seed,
        _ => seed,
    }
}

fn progress(job: &Job, config: &Config) -> Progress {
    match job.is_first() {
        true => Progress::new(config.train.print_freq as u64),
        false => Progress::silent(),
    }
}

fn last_words(config: &Config, outcome: &TrainOutcome) -> String {
    let (step, best) = (outcome.steps, outcome.best_metric.unwrap_or(0.0));
    let folder = config.run.out_dir.display();
    match outcome.end {
        End::Stopped { .. } => format!(
            "[stop] == asked to stop after step {step}; the checkpoint is in {folder}; the same command goes on =="
        ),
        End::Finished => {
            format!("            =======  Training Finished  =======\n   best Acc@1 {best:.3} | {folder}")
        }
    }
}
