//! `drumline-train train`: from a configuration to a trained network.

use std::time::{SystemTime, UNIX_EPOCH};

use drumline::{Ddp, ProcessGroup};
use drumline_torch::{Determinism, flush_denormals, keep_freed_memory, use_deterministic_algorithms};
use serde_json::Value as Json;
use tch::Device;
use tch::nn::VarStore;

use super::args::TrainArgs;
use super::checked::{CheckedTraining, check_out_dir, device};
use super::evaluate::Evaluation;
use super::job::Job;
use super::parity;
use super::pieces::{self, Resumed};
use super::trainer::{EpochEnd, IsBest, Position, Trainer};
use crate::config::{Config, Value};
use crate::events::{Begin, Event, EventLog, RunEvent};
use crate::progress::Progress;

/// The version that the workspace pins.
const LIBTORCH: &str = "2.11.0";

/// Trains as the command line says; an error if that was not possible.
pub(super) fn run(args: &TrainArgs) -> anyhow::Result<()> {
    set_up_process()?;
    let checked = CheckedTraining::new(&args.run);
    let job = Job::join()?;
    let checked = job.agree(checked)?;
    job.say_hello();
    let seed = job.seed(checked.run.config.run.rng_seed)?;
    if let Some(steps) = args.verify_parity {
        return parity::verify(&job, &checked, seed, steps);
    }
    prepare_folder(&job, &checked.run.config)?;
    let resumed = find_checkpoint(&job, &checked.run.config)?;
    let seed = seed_of(&checked.run.config, seed, resumed.as_ref());
    let mut trainer = build(&job, &checked, seed)?;
    let begin = resume(&mut trainer, resumed)?;
    trainer.progress = progress(&job, args, &checked.run.config);
    trainer.log = job.agree(open_log(&trainer, begin, seed))?;
    trainer.progress.say("            =======  Training  =======");
    let end = epochs(&mut trainer)?;
    trainer.progress.finish();
    trainer.progress.say(&last_words(&trainer, end));
    Ok(())
}

/// Epochs, each with an evaluation and a checkpoint, until there are enough or a signal asks for the end.
fn epochs(trainer: &mut Trainer<'_>) -> anyhow::Result<EpochEnd> {
    let max_epoch = trainer.config.optim.max_epoch;
    let mut end = EpochEnd::Finished;
    while trainer.at.epoch < max_epoch && end == EpochEnd::Finished {
        end = trainer.train_epoch()?;
        let is_best = match end {
            EpochEnd::Stopped => Some(IsBest::No),
            EpochEnd::Finished | EpochEnd::MaxSteps => trainer.evaluate()?,
        };
        trainer.save(is_best.unwrap_or(IsBest::No))?;
        if is_best.is_none() {
            end = EpochEnd::Stopped;
        }
    }
    Ok(end)
}

/// What must be set before the first tensor.
fn set_up_process() -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    Ok(())
}

fn prepare_folder(job: &Job, config: &Config) -> anyhow::Result<()> {
    let outcome = match job.is_first() {
        true => check_out_dir(&config.run.out_dir).and_then(|()| Ok(config.save().map(drop)?)),
        false => Ok(()),
    };
    job.agree(outcome)
}

/// Model, data and optimizer, equal on all ranks.
fn build<'a>(job: &'a Job, checked: &'a CheckedTraining, seed: u64) -> anyhow::Result<Trainer<'a>> {
    let config = &checked.run.config;
    let device = job.agree(device(config.run.device, job.local_rank))?;
    if config.cudnn.deterministic {
        use_deterministic_algorithms(Determinism::Require)?;
    }
    tch::Cuda::cudnn_set_benchmark(config.cudnn.benchmark);
    tch::manual_seed(seed as i64);
    let store = VarStore::new(device);
    let (net, options) = job.agree(pieces::model(config, &store, &job.group))?;
    let replica = Ddp::new(net, &store, &job.group, options)?;
    let optimizer = job.agree(pieces::sgd(&store, &config.optim))?;
    let schedule = job.agree(pieces::schedule(&config.optim))?;
    let images = job.agree(pieces::train_images(checked))?;
    let train = job.agree(pieces::train_loader(&images, config, job.place(), seed))?;
    let loader = job.agree(pieces::test_loader(&checked.run, job.place()))?;
    Ok(Trainer {
        job,
        config,
        device,
        replica,
        store,
        optimizer,
        schedule,
        at: Position { sampler: train.sampler().start(0), ..Position::default() },
        train,
        evaluation: Evaluation { loader, device, k: config.train.topk },
        checkpoints: pieces::checkpoints(config),
        log: None,
        progress: Progress::silent(),
    })
}

/// The last checkpoint, if there is one and it is wanted.
fn find_checkpoint(job: &Job, config: &Config) -> anyhow::Result<Option<Resumed>> {
    if !config.train.auto_resume {
        return Ok(None);
    }
    let found = pieces::checkpoints(config).load_latest(&job.group)?;
    job.agree(found.map(|found| Resumed::new(found.state)).transpose())
}

/// A run that was given no seed goes on with the one that it drew.
fn seed_of(config: &Config, seed: u64, resumed: Option<&Resumed>) -> u64 {
    match (config.run.rng_seed, resumed) {
        (None, Some(resumed)) => resumed.at.sampler.seed,
        _ => seed,
    }
}

/// Goes on from a checkpoint.
fn resume(trainer: &mut Trainer<'_>, resumed: Option<Resumed>) -> anyhow::Result<Begin> {
    let Some(resumed) = resumed else { return Ok(Begin::Anew) };
    let optimizer = trainer.config.train.load_opt.then_some(&mut trainer.optimizer);
    trainer.job.agree(resumed.restore(&trainer.store, optimizer))?;
    trainer.at = resumed.at;
    let in_a_step = trainer.config.train.batch_size * trainer.job.group.size();
    trainer.at.in_epoch = (trainer.at.sampler.samples_seen / in_a_step) as u64;
    Ok(Begin::After { step: resumed.at.step })
}

fn progress(job: &Job, args: &TrainArgs, config: &Config) -> Progress {
    match job.is_first() {
        true => Progress::new(config.train.print_freq as u64, args.run.terminal.as_deref()),
        false => Progress::silent(),
    }
}

/// Rank 0 opens `metrics.jsonl` and writes its first line.
fn open_log(trainer: &Trainer<'_>, begin: Begin, seed: u64) -> anyhow::Result<Option<EventLog>> {
    if !trainer.job.is_first() {
        return Ok(None);
    }
    if let Begin::After { step } = begin {
        trainer.progress.say(&format!("[resume] == after step {step}, epoch {} ==", trainer.at.epoch));
    }
    let mut log = EventLog::open(&trainer.config.run.out_dir, begin)?;
    log.write(&Event::Run(run_event(trainer, &trainer.job.group, seed)))?;
    Ok(Some(log))
}

fn run_event(trainer: &Trainer<'_>, group: &ProcessGroup, seed: u64) -> RunEvent {
    let entries = trainer.config.entries().into_iter();
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    RunEvent {
        step: trainer.at.step,
        epoch: trainer.at.epoch,
        world_size: group.size(),
        num_nodes: group.num_nodes(),
        seed,
        device: match trainer.device {
            Device::Cuda(index) => format!("cuda:{index}"),
            other => format!("{other:?}").to_lowercase(),
        },
        num_threads: tch::get_num_threads(),
        drumline: env!("CARGO_PKG_VERSION"),
        libtorch: LIBTORCH,
        time: now.map_or(0, |now| now.as_secs()),
        config: entries.map(|entry| (entry.key, json(&entry.value))).collect(),
    }
}

fn json(value: &Value) -> Json {
    match value {
        Value::Null | Value::Section(_) => Json::Null,
        Value::Bool(value) => (*value).into(),
        Value::Int(value) => (*value).into(),
        Value::Float(value) => (*value).into(),
        Value::Text(text) => text.as_str().into(),
        Value::List(values) => values.iter().map(json).collect(),
    }
}

fn last_words(trainer: &Trainer<'_>, end: EpochEnd) -> String {
    let Position { step, best, .. } = trainer.at;
    let folder = trainer.config.run.out_dir.display();
    match end {
        EpochEnd::Stopped => format!(
            "[stop] == asked to stop after step {step}; the checkpoint is in {folder}; the same command goes on =="
        ),
        EpochEnd::MaxSteps | EpochEnd::Finished => {
            format!("            =======  Training Finished  =======\n   best Acc@1 {best:.3} | {folder}")
        }
    }
}
