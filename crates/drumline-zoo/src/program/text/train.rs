//! `drumline-train train` on text.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use drumline::trainer::{
    CallbackResult, DistTrainer, EarlyStop, Every, GradientClip, MasterCallback, TrainState, Warmup,
};
use drumline::{AdamOptions, ensure_alike};
use drumline_text::{BatchBy, BatchPlan};
use tch::Tensor;
use tch::nn::{ModuleT, VarStore};

use super::parts;
use super::sets::Sets;
use crate::optimizer::{OptimizerKeys, with_optimizer};
use crate::precision::Numbers;
use crate::program::args::{RunArgs, TrainArgs};
use crate::program::course::{Begin, Course};
use crate::program::job::Job;
use crate::program::pieces::Percent;
use crate::program::shown::TEXTS;
use crate::text::config::{AfterWarmup, TextOptim, TextTrain};
use crate::text::{Lexicon, Task, TextConfig, Texts, figure_of_step, figures, loss};

/// Batches within which texts of like length are brought together: enough to pad little, few enough that an epoch does not go from
/// short texts to long ones.
const BUFFER: usize = 16;

/// One of the nets.
type Net = dyn ModuleT;
type TextTrainer<'a> = DistTrainer<'a, Net, (Tensor, Tensor)>;

/// Trains as the command line says; an error if that was not possible.
pub(in crate::program) fn train(args: &TrainArgs) -> anyhow::Result<()> {
    let config = checked(&args.run);
    let job = Job::join()?;
    let config = job.agree(config)?;
    let parity = args.verify_parity.is_none();
    job.agree(parity.then_some(()).context("--verify-parity is for images; try without"))?;
    job.say_hello();
    ensure_alike(&job.group, "training", shared_keys(&config))?;
    let mut course = Course::from(&config);
    let seed = job.seed(config.run.rng_seed)?;
    let Some(begin) = course.begin(&job, seed)? else { return Ok(()) };
    let lexicon = lexicon(&job, &config, &begin)?;
    course.best_by = best_by(&config, &lexicon);
    let sets = job.agree(Sets::read(&config, &lexicon, begin.found.as_ref()))?;
    sets.ensure_alike(&job)?;
    sets.notes.iter().for_each(|note| begin.progress.say(&format!("note: {note}")));
    run(&job, &config, &course, (begin, lexicon, sets))
}

/// An error if the configuration is wrong, or files that it names are not there.
pub(in crate::program) fn check_training(args: &TrainArgs) -> anyhow::Result<()> {
    ensure!(args.verify_parity.is_none(), "--verify-parity is for images; try without");
    checked(&args.run).map(drop)
}

fn checked(args: &RunArgs) -> anyhow::Result<TextConfig> {
    let config = parts::checked(args)?;
    parts::check_file("TEXT.TRAIN", &config.text.train)?;
    if let Some(dev) = &config.text.dev {
        parts::check_file("TEXT.DEV", dev)?;
    }
    Ok(config)
}

/// What all ranks must have in common; files and folders may have other names on other hosts.
fn shared_keys(config: &TextConfig) -> Vec<(String, String)> {
    let own =
        ["TEXT.TRAIN", "TEXT.DEV", "TEXT.TEST", "MODEL.WEIGHTS", "OUT_DIR", "CFG_DEST", "RNG_SEED", "DEVICE"];
    let keys = config.entries().into_iter().filter(|entry| !own.contains(&entry.key.as_str()));
    keys.map(|entry| (entry.key, entry.value.to_string())).collect()
}

/// That of the training file; a run that goes on keeps its own, whose numbers its weights know.
fn lexicon(job: &Job, config: &TextConfig, begin: &Begin) -> anyhow::Result<Lexicon> {
    if begin.found.is_some() {
        return Ok(Lexicon::read_by_all(&job.group, &config.run.out_dir)?);
    }
    let make = || {
        let texts = Texts::read(&config.text.train, &config.text)?;
        Ok(Lexicon::of(&texts, &config.text))
    };
    Ok(Lexicon::shared(&job.group, make)?)
}

fn best_by(config: &TextConfig, lexicon: &Lexicon) -> String {
    let first = || figures(config.text.task, &lexicon.labels)[0].0.to_owned();
    config.train.metric_key.clone().unwrap_or_else(first)
}

fn run(
    job: &Job,
    config: &TextConfig,
    course: &Course,
    (begin, lexicon, sets): (Begin, Lexicon, Sets),
) -> anyhow::Result<()> {
    let device = job.device(config.run.device)?;
    tch::manual_seed(begin.seed as i64);
    let store = VarStore::new(device);
    let net = job.agree(parts::net(config, &lexicon, &store))?;
    let seed = begin.seed;
    let trainer = job.agree(trainer(job, (config, &lexicon), (&*net, &store), (sets, seed)))?;
    let trainer = job.agree(with_optimizer(trainer, optimizer_keys(config), &store))?;
    let trainer = match begin.found {
        Some(_) => trainer,
        None => trainer.master_callback(SaveLexicon { lexicon, out_dir: config.run.out_dir.clone() }),
    };
    course.train(job, trainer, begin)
}

/// Writes the words and labels, once nothing stands against the run: one that was refused leaves those of the run before alone.
struct SaveLexicon {
    lexicon: Lexicon,
    out_dir: PathBuf,
}

impl MasterCallback for SaveLexicon {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        Ok(self.lexicon.write(&self.out_dir)?)
    }
}

/// The trainer that the configuration asks for, by the rank alone.
fn trainer<'a>(
    job: &Job,
    (config, lexicon): (&TextConfig, &Lexicon),
    (net, store): (&'a Net, &'a VarStore),
    (sets, seed): (Sets, u64),
) -> anyhow::Result<TextTrainer<'a>> {
    let (train, task, labels) = (&config.train, config.text.task, &lexicon.labels);
    let sampler = sets.train.sampler(plan(train, seed), job.place())?;
    let (name, figure) = figure_of_step(task, labels);
    let mut trainer = DistTrainer::new(&job.group, net, store, sets.train)
        .loss(loss(task))
        .sampler(sampler)
        .train_metric(name, Percent(figure))
        .callback(warmup(&config.optim))
        .dev_batch_size(config.test.batch_size)
        .update_every(train.accumulate)
        .num_workers(train.workers);
    if let Some(dev) = sets.dev {
        let sampler = dev.sampler(parts::plan_of_evaluation(config.test.batch_size), job.place())?;
        trainer = trainer.dev_data(dev).dev_sampler(sampler);
        for (name, figure) in figures(task, labels) {
            trainer = trainer.metric(name, Percent(figure));
        }
    }
    if let Some(key) = &train.metric_key {
        trainer = trainer.metric_key(key);
    }
    if let Some(norm) = config.optim.grad_clip {
        trainer = trainer.callback(GradientClip::norm(norm));
    }
    Ok(match train.early_stop {
        Some(patience) => trainer.callback(EarlyStop::patience(patience)),
        None => trainer,
    })
}

fn plan(train: &TextTrain, seed: u64) -> BatchPlan {
    let &TextTrain { batch_size, bucket, shuffle, .. } = train;
    let buffer = BUFFER.saturating_mul(batch_size);
    BatchPlan { by: BatchBy::Samples(batch_size), bucket, buffer, shuffle, seed }
}

/// From 1 on a number of steps, as fastNLP's.
fn warmup(optim: &TextOptim) -> Warmup {
    let warmup = match optim.warmup {
        fraction if fraction < 1.0 => Warmup::fraction(fraction),
        steps => Warmup::steps(steps as u64),
    };
    match optim.schedule {
        AfterWarmup::Linear => warmup.then_linear(),
        AfterWarmup::Constant => warmup,
    }
}

fn optimizer_keys(config: &TextConfig) -> OptimizerKeys {
    let optim = &config.optim;
    let AdamOptions { betas, eps, .. } = AdamOptions::default();
    OptimizerKeys {
        name: optim.method,
        lr: optim.base_lr,
        weight_decay: optim.weight_decay,
        momentum: optim.momentum,
        betas,
        eps,
        numbers: Numbers::of(config.run.precision, &config.fp16),
    }
}

impl From<&TextConfig> for Course {
    fn from(config: &TextConfig) -> Self {
        let (train, optim) = (&config.train, &config.optim);
        Self {
            run: config.run.clone(),
            entries: config.entries(),
            yaml: config.to_yaml(),
            auto_resume: train.auto_resume,
            accept_new_data: train.accept_new_data,
            max_epoch: optim.max_epoch,
            max_steps: train.max_steps,
            evaluates: config.text.dev.is_some(),
            print_freq: train.print_freq as u64,
            eval_print_freq: train.print_freq as u64,
            words: TEXTS,
            save_every: Every::Epochs(1),
            tensorboard: train.tensorboard,
            trace_steps: train.trace_steps,
            best_by: train.metric_key.clone().unwrap_or_else(|| match config.text.task {
                Task::Classify => "acc".to_owned(),
                Task::Tag => "figure".to_owned(), // which one, the labels will tell
            }),
            calmer: "a smaller OPTIM.BASE_LR or more OPTIM.WARMUP",
        }
    }
}
