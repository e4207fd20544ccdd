//! `drumline-train train`: from a configuration to a trained network.

use drumline::{Ddp, ProcessGroup};
use drumline_observe::bar::Progress;
use drumline_observe::events::{Begin, EndEvent, Event, EventLog, Reason, RunEvent, seconds_now};
use drumline_torch::{Determinism, flush_denormals, keep_freed_memory, use_deterministic_algorithms};
use serde_json::Value as Json;
use tch::Device;
use tch::nn::VarStore;

use super::args::TrainArgs;
use super::checked::{CheckedTraining, check_out_dir, device};
use super::evaluate::Evaluation;
use super::failure::{Stopped, in_words};
use super::job::Job;
use super::parity;
use super::pieces::{self, Resumed};
use super::trainer::{EpochEnd, IsBest, Position, Trainer};
use crate::config::{Config, Value};

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
    job.agree(if job.is_first() { check_out_dir(&checked.run.config.run.out_dir) } else { Ok(()) })?;
    let resumed = find_checkpoint(&job, &checked.run.config)?;
    let seed = seed_of(&checked.run.config, seed, resumed.as_ref());
    let mut trainer = build(&job, &checked, seed)?;
    let begin = resume(&mut trainer, resumed)?;
    trainer.progress = progress(&job, args, &checked.run.config);
    let shown = trainer.progress.clone();
    trainer.evaluation.say = Box::new(move |line| shown.say(line));
    if is_over(&trainer) {
        trainer.progress.say(&nothing_left(&trainer));
        return Ok(());
    }
    // Only now: a run that was refused leaves the files of the one before alone.
    job.agree(if job.is_first() { Ok(checked.run.config.save().map(drop)?) } else { Ok(()) })?;
    trainer.log = job.agree(open_log(&trainer, begin, seed))?;
    trainer.progress.say("            =======  Training  =======");
    let end = epochs(&mut trainer);
    let told = trainer.write(&Event::End(end_event(&trainer.at, &end)));
    trainer.progress.finish();
    let end = end?;
    trainer.job.agree(told)?;
    trainer.progress.say(&last_words(&trainer, end));
    match job.signal_that_ended_it() {
        Some(signal) if end == EpochEnd::Stopped => Err(Stopped { signal }.into()),
        _ => Ok(()),
    }
}

/// Whether the checkpoint is that of the last step.
fn is_over(trainer: &Trainer<'_>) -> bool {
    let max_steps = trainer.config.train.max_steps;
    trainer.at.epoch >= trainer.config.optim.max_epoch
        || max_steps.is_some_and(|most| trainer.at.step >= most)
}

fn nothing_left(trainer: &Trainer<'_>) -> String {
    let Position { step, epoch, best, .. } = trainer.at;
    format!(
        "[resume] == nothing left to do after step {step}, {epoch} epochs; best Acc@1 {best:.3} in {}; \
         try a larger OPTIM.MAX_EPOCH or TRAIN.MAX_STEPS, or another OUT_DIR ==",
        trainer.config.run.out_dir.display()
    )
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
        evaluation: Evaluation {
            loader,
            device,
            k: config.train.topk,
            print_freq: config.test.print_freq,
            say: Box::new(|_| ()),
        },
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
        trainer.progress.say(&format!("[resume] == after step {step}, epoch {} ==", trainer.at.epoch + 1));
    }
    let mut log = EventLog::open(&trainer.config.run.out_dir, begin)?;
    log.write(&Event::Run(run_event(trainer, &trainer.job.group, seed)))?;
    Ok(Some(log))
}

fn run_event(trainer: &Trainer<'_>, group: &ProcessGroup, seed: u64) -> RunEvent {
    let entries = trainer.config.entries().into_iter();
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
        drumline: env!("CARGO_PKG_VERSION").into(),
        libtorch: drumline::LIBTORCH.into(),
        time: seconds_now(),
        config: entries.map(|entry| (entry.key, json(&entry.value))).collect(),
    }
}

fn end_event(at: &Position, end: &anyhow::Result<EpochEnd>) -> EndEvent {
    let (reason, error) = match end {
        Ok(EpochEnd::Finished | EpochEnd::MaxSteps) => (Reason::Finished, None),
        Ok(EpochEnd::Stopped) => (Reason::Stopped, None),
        Err(error) => (Reason::Failed, Some(in_words(error))),
    };
    EndEvent { step: at.step, epoch: at.epoch, reason, error, time: seconds_now() }
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
