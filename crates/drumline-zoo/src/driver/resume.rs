//! How a run starts: its folder, its last checkpoint, and whether that checkpoint matches the configuration.

use anyhow::{Context, bail, ensure};
use drumline::checkpoint::{Checkpoints, Loaded};
use drumline::data::SamplerPosition;
use drumline::trainer::was_evaluated;
use drumline_observe::bar::Progress;
use serde_json::Value as Json;

use super::host::check_folders;
use super::job::Job;
use super::parallelism::Parallelism;
use crate::config::table;
use crate::task::{Folders, ResumeMode, Start, Task, is_at, shared};

/// The state that a training run starts from.
pub(super) struct Begin {
    pub(super) found: Option<Loaded>,
    /// The folder of checkpoints: the run resumes from it and saves to it.
    pub(super) checkpoints: Checkpoints,
    pub(super) progress: Progress,
    pub(super) seed: u64,
}

impl Begin {
    pub(super) fn start(&self) -> Start<'_> {
        self.found.as_ref().map_or(Start::New, Start::Resumed)
    }
}

/// Looks for a checkpoint to resume from. If the run has already finished, it prints a line and returns `None`.
pub(super) fn begin<T: Task>(job: &Job, task: &T, seed: u64) -> anyhow::Result<Option<Begin>> {
    let Folders { own, key, checkpoints, log, .. } = task.folders();
    job.claim(key, &own)?;
    job.on_rank_0(|| check_folders(task))?;
    let is_resumed = match task.resume_mode() {
        ResumeMode::Auto => true,
        ResumeMode::Never => false,
        ResumeMode::AfterRestart => job.is_restarted,
    };
    if task.resume_mode() == ResumeMode::AfterRestart && !is_resumed {
        job.on_rank_0(|| check_unused(&Checkpoints::new(&checkpoints), key))?;
    }
    let progress = if job.is_rank_0() {
        Progress::new(shared(task).train.print_freq as u64)
    } else {
        Progress::silent()
    };
    let progress = progress.log_to(&log);
    let progress =
        job.agree(progress.with_context(|| format!("cannot write the log in {}", log.display())))?;
    let to_log = progress.clone();
    let checkpoints = Checkpoints::new(checkpoints).on_warning(move |line| to_log.note(line));
    let found = if is_resumed { find(job, task, &checkpoints)? } else { None };
    if let Some(found) = &found {
        model_changes(task, found).iter().for_each(|line| progress.say(line));
        if is_over(task, found) {
            progress.say(&nothing_left(task, found));
            return Ok(None);
        }
    }
    let seed = seed_of(task, seed, found.as_ref());
    Ok(Some(Begin { found, checkpoints, progress, seed }))
}

/// The latest checkpoint. Ranks that divide the training's state among them read their parts of it later.
fn find<T: Task>(job: &Job, task: &T, checkpoints: &Checkpoints) -> anyhow::Result<Option<Loaded>> {
    let parallelism = job.agree(Parallelism::of(&job.group, &shared(task)))?;
    Ok(if parallelism.is_divided() {
        checkpoints.find_latest(&job.group)?
    } else {
        checkpoints.load_latest(&job.group)?
    })
}

fn check_unused(checkpoints: &Checkpoints, key: &str) -> anyhow::Result<()> {
    let folder = checkpoints.dir();
    ensure!(
        folder.join("latest").symlink_metadata().is_err(),
        "{} has checkpoints of another training; try --reload to resume from the last (run_configs.reload True), or another \
         {key}",
        folder.display()
    );
    Ok(())
}

/// Whether the checkpoint is at the last step and its evaluation is complete.
fn is_over<T: Task>(task: &T, found: &Loaded) -> bool {
    let keys = shared(task);
    let is_enough = keys.train.max_steps.is_some_and(|most| found.state.step >= most);
    let is_last = found.state.epoch >= keys.optim.max_epoch || is_enough;
    is_last && (!task.evaluates() || was_evaluated(found))
}

fn nothing_left<T: Task>(task: &T, found: &Loaded) -> String {
    let (step, epoch) = (found.state.step, found.state.epoch);
    let best = found.best_metric().map(|best| format!("; best {} {best:.3}", task.best_by()));
    let Folders { own, key, .. } = task.folders();
    format!(
        "[resume] == nothing left to do after step {step}, {epoch} epochs{} in {}; try {}, or another {key} ==",
        best.unwrap_or_default(),
        own.display(),
        T::REPORT_STYLE.finished_advice
    )
}

/// The seed of the run. A resumed run without a configured seed uses the seed that it first drew.
fn seed_of<T: Task>(task: &T, seed: u64, found: Option<&Loaded>) -> u64 {
    let saved = found.and_then(|found| serde_json::from_value(found.state.sampler.clone()).ok());
    match (shared(task).run.rng_seed, saved) {
        (None, Some(SamplerPosition { seed, .. })) => seed,
        _ => seed,
    }
}

/// A key or fingerprint whose value differs from the checkpoint's.
pub(crate) struct Change<'a> {
    pub(crate) key: String,
    pub(crate) saved: &'a Json,
    pub(crate) now: Json,
}

/// The entries of `now` that differ from the checkpoint. Keys that the checkpoint does not have are ignored.
pub(crate) fn changes<'a>(
    found: &'a Loaded,
    now: impl IntoIterator<Item = (String, Json)>,
) -> impl Iterator<Item = Change<'a>> {
    now.into_iter().filter_map(|(key, now)| {
        let saved = found.state.config.get(&key).filter(|saved| **saved != now)?;
        Some(Change { key, saved, now })
    })
}

/// A note for each changed key that defines the model, which explains weights that do not fit.
fn model_changes<T: Task>(task: &T, found: &Loaded) -> Vec<String> {
    let is_of_model = |key: &str| T::MODEL_KEYS.iter().any(|name| is_at(key, name));
    let now = table::to_json(task.config()).filter(|(key, _)| is_of_model(key));
    let folder = task.folders().own;
    let line = |Change { key, saved, now }: Change<'_>| {
        format!("note: the run in {} has {key} {saved}, and now it is {now}", folder.display())
    };
    changes(found, now).map(line).collect()
}

/// Returns an error if the rest of the epoch would have other batches. A checkpoint stores how many batches were used,
/// so the batches must stay the same; the trainer itself refuses other data.
pub(super) fn check_batches<T: Task>(task: &T, found: &Loaded) -> anyhow::Result<()> {
    let place: SamplerPosition = serde_json::from_value(found.state.sampler.clone())?;
    if place.samples_seen == 0 {
        return Ok(());
    }
    let now = table::to_json(task.config()).filter(|(key, _)| T::BATCH_KEYS.contains(&key.as_str()));
    if let Some(Change { key, saved, now }) = changes(found, now).next() {
        bail!(
            "{} is in the middle of an epoch: {key} was {saved}, and is {now} now, so batches would have other {}; \
             try {saved} up to the end of the epoch, or another {} for a new run with {} of this one",
            found.path.display(),
            T::REPORT_STYLE.samples,
            task.folders().key,
            T::WEIGHTS_KEY
        );
    }
    Ok(())
}
