//! `drumline-train train` of a GPT.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, bail, ensure};
use drumline::checkpoint::Loaded;
use drumline::trainer::{
    CallbackResult, DistTrainer, EarlyStop, Every, GradientClip, MasterCallback, TrainState, Warmup,
};
use drumline::{
    AdamOptions, AdamW, Dataset, DistributedSampler, ParameterGroups, SamplerOptions, ensure_alike,
    no_decay_on_norms,
};
use drumline_text::GptTokenizer;
use serde_json::Value as Json;
use tch::Tensor;
use tch::nn::VarStore;

use super::parts::{Checked, TOKENIZER};
use crate::gpt::config::{AfterWarmup, GptOptim};
use crate::gpt::{Begin, GptConfig, PerToken, Perplexity, TokenData, TokensPerSecond};
use crate::models::gpt::Gpt;
use crate::precision::Numbers;
use crate::program::args::TrainArgs;
use crate::program::course::{self, Course};
use crate::program::job::Job;
use crate::program::resumed::{Change, changes, is_within_epoch};
use crate::program::shown::TOKENS;

type GptTrainer<'a> = DistTrainer<'a, Gpt, (Tensor, Tensor)>;

const BLOCK: &str = "MODEL.BLOCK";

/// What a model is best by: less is better.
const BEST_BY: &str = "-ppl";

/// Trains as the command line says; an error if that was not possible.
pub(in crate::program) fn train(args: &TrainArgs) -> anyhow::Result<()> {
    let checked = Checked::new(&args.run).and_then(|checked| Ok((Sets::open(&checked)?, checked)));
    let job = Job::join()?;
    let (sets, checked) = job.agree(checked)?;
    let parity = args.verify_parity.is_none();
    job.agree(parity.then_some(()).context("--verify-parity is for images; try without"))?;
    job.say_hello();
    job.agree(sets.enough(&checked.config, job.group.size()))?;
    ensure_alike(&job.group, "set of tokens", sets.given())?;
    let config = &checked.config;
    let course = Course::from(config);
    let seed = job.seed(config.run.rng_seed)?;
    let Some(begin) = course.begin(&job, seed)? else { return Ok(()) };
    if let Some(found) = &begin.found {
        // The folder of rank 0 counts.
        job.agree(if job.is_first() { checked.same_model() } else { Ok(()) })?;
        job.agree(same_windows(found, config))?;
    }
    run(&job, &checked, &course, (begin, sets))
}

/// An error if the configuration is wrong, or files that it names are not there.
pub(in crate::program) fn check_training(args: &TrainArgs) -> anyhow::Result<()> {
    ensure!(args.verify_parity.is_none(), "--verify-parity is for images; try without");
    let checked = Checked::new(&args.run)?;
    let tokens = &checked.config.tokens;
    checked.data("GPT.TRAIN", &tokens.train)?;
    tokens.dev.as_ref().map_or(Ok(()), |dev| checked.data("GPT.DEV", dev).map(drop))
}

/// The data of a training.
struct Sets {
    train: TokenData,
    dev: Option<TokenData>,
    /// Tell whether others have the same.
    fingerprints: [String; 2],
}

impl Sets {
    fn open(checked: &Checked) -> anyhow::Result<Self> {
        let tokens = &checked.config.tokens;
        let train = checked.data("GPT.TRAIN", &tokens.train)?;
        let dev = tokens.dev.as_ref().map(|dev| checked.data("GPT.DEV", dev)).transpose()?;
        let of_dev = dev.as_ref().map_or(Ok(String::new()), TokenData::fingerprint)?;
        let fingerprints = [train.fingerprint()?, of_dev];
        Ok(Self { train, dev, fingerprints })
    }

    /// Batches of all ranks have the same shape: there must be enough for one.
    fn enough(&self, config: &GptConfig, ranks: usize) -> anyhow::Result<()> {
        let (windows, wanted) = (self.train.len(), config.train.batch_size * ranks);
        ensure!(
            windows >= wanted,
            "GPT.TRAIN has {windows} windows of {} tokens, expected at least {wanted}, a batch for each of {ranks} ranks; try \
             more text, or a smaller TRAIN.BATCH_SIZE",
            config.model.block
        );
        Ok(())
    }

    /// Hosts with other files would train past each other.
    fn given(&self) -> Vec<(String, String)> {
        let [train, dev] = &self.fingerprints;
        vec![("GPT.TRAIN".to_owned(), train.clone()), ("GPT.DEV".to_owned(), dev.clone())]
    }
}

/// An error if what is left of an epoch would be of other windows. Other tokens are refused by the trainer.
fn same_windows(found: &Loaded, config: &GptConfig) -> anyhow::Result<()> {
    let now: [(&str, Json); 2] =
        [(BLOCK, config.model.block.into()), ("TRAIN.SHUFFLE", config.train.shuffle.into())];
    let is_within_epoch = is_within_epoch(found)?;
    let path = found.path.display();
    let mut changes = changes(found, now.map(|(key, now)| (key.to_owned(), now)));
    if let Some(Change { key, saved, now }) = changes.next().filter(|_| is_within_epoch) {
        bail!(
            "{path} is in the middle of an epoch: {key} was {saved}, and is {now} now; try what it was, or another OUT_DIR with \
             MODEL.WEIGHTS of this one"
        );
    }
    Ok(())
}

fn run(
    job: &Job,
    checked: &Checked,
    course: &Course,
    (begin, sets): (course::Begin, Sets),
) -> anyhow::Result<()> {
    let (config, seed) = (&checked.config, begin.seed);
    let device = job.device(config.run.device)?;
    tch::manual_seed(seed as i64);
    let store = VarStore::new(device);
    let net = job.agree(checked.net(&store))?;
    let trainer = job.agree(trainer(job, config, (&net, &store), (sets, seed)))?;
    let trainer = job.agree(with_optimizer(trainer, config, &store))?;
    let keep = SaveTokenizer { tokenizer: checked.tokenizer.clone(), out_dir: config.run.out_dir.clone() };
    let trainer = if begin.found.is_some() { trainer } else { trainer.master_callback(keep) };
    course.train(job, trainer, begin)
}

/// Leaves the tokenizer beside the checkpoints of a new run: `drumline generate` needs no other file. Bytes have none.
struct SaveTokenizer {
    tokenizer: GptTokenizer,
    out_dir: PathBuf,
}

impl MasterCallback for SaveTokenizer {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        let of_run_before = self.out_dir.join(TOKENIZER);
        if self.tokenizer.save(&self.out_dir)?.is_none() && of_run_before.is_file() {
            fs::remove_file(of_run_before)?;
        }
        Ok(())
    }
}

/// The trainer that the configuration asks for, by the rank alone.
fn trainer<'a>(
    job: &Job,
    config: &GptConfig,
    (net, store): (&'a Gpt, &'a VarStore),
    (sets, seed): (Sets, u64),
) -> anyhow::Result<GptTrainer<'a>> {
    let ((rank, num_replicas), train) = (job.place(), &config.train);
    let (num_samples, shuffle) = (sets.train.len(), train.shuffle);
    let options = SamplerOptions { num_samples, num_replicas, rank, shuffle, seed, drop_last: true };
    let windows = sets.train.beginning(if shuffle { Begin::Moved } else { Begin::Fixed });
    let mut trainer = DistTrainer::new(&job.group, net, store, windows)
        .loss(PerToken)
        .sampler(DistributedSampler::new(options)?)
        .train_metric("tokens_per_s", TokensPerSecond::default())
        .callback(warmup(&config.optim))
        .batch_size_per_gpu(train.batch_size)
        .dev_batch_size(config.test.batch_size)
        .drop_last(true)
        .update_every(train.accumulate)
        .num_workers(train.workers)
        .pin_memory(train.pin_memory)
        .validate_every(train.eval_freq.map_or(Every::Epochs(1), Every::Steps));
    if let Some(dev) = sets.dev {
        trainer = trainer.dev_data(dev).metric("ppl", Perplexity::default()).metric_key(BEST_BY);
    }
    if let Some(norm) = config.optim.grad_clip {
        trainer = trainer.callback(GradientClip::norm(norm));
    }
    Ok(match train.early_stop {
        Some(patience) => trainer.callback(EarlyStop::patience(patience)),
        None => trainer,
    })
}

/// From 1 on a number of steps.
fn warmup(optim: &GptOptim) -> Warmup {
    let warmup = match optim.warmup {
        fraction if fraction < 1.0 => Warmup::fraction(fraction),
        steps => Warmup::steps(steps as u64),
    };
    match optim.schedule {
        AfterWarmup::Cosine => warmup.then_cosine(optim.min_lr),
        AfterWarmup::Constant => warmup,
    }
}

/// AdamW: matrices decay, norms and biases do not.
fn with_optimizer<'a>(
    trainer: GptTrainer<'a>,
    config: &GptConfig,
    store: &VarStore,
) -> anyhow::Result<GptTrainer<'a>> {
    let optim = &config.optim;
    let options = AdamOptions {
        lr: optim.base_lr,
        betas: (optim.betas[0], optim.betas[1]),
        weight_decay: Some(optim.weight_decay),
        ..AdamOptions::default()
    };
    let make = |all: ParameterGroups| AdamW::new(no_decay_on_norms(all.into_parameters()), options);
    Ok(Numbers::of(config.run.precision, &config.fp16).with_optimizer(trainer, store, make)?)
}

impl From<&GptConfig> for Course {
    fn from(config: &GptConfig) -> Self {
        let (train, optim) = (&config.train, &config.optim);
        Self {
            run: config.run.clone(),
            entries: config.entries(),
            yaml: config.to_yaml(),
            auto_resume: train.auto_resume,
            accept_new_data: train.accept_new_data,
            max_epoch: optim.max_epoch,
            max_steps: train.max_steps,
            evaluates: config.tokens.dev.is_some(),
            print_freq: train.print_freq as u64,
            eval_print_freq: train.print_freq as u64,
            words: TOKENS,
            save_every: train.save_freq.map_or(Every::Epochs(1), Every::Steps),
            tensorboard: train.tensorboard,
            trace_steps: train.trace_steps,
            best_by: BEST_BY.trim_start_matches('-').to_owned(),
            calmer: "a smaller OPTIM.BASE_LR, more OPTIM.WARMUP, or OPTIM.GRAD_CLIP",
        }
    }
}
