//! `drumline-train nmt`, and `train` with NJUNMT's configuration: translation, from text files to a trained Transformer.

mod args;
mod trainer;

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail, ensure};
use drumline::checkpoint::{Checkpoints, Loaded};
use drumline::trainer::{End, LoadBestModel, TrainOutcome};
use drumline_torch::{flush_denormals, keep_freed_memory};
use tch::nn::VarStore;

use super::args::TrainArgs;
use super::checked::{check_writable, device};
use super::ending::Stopped;
use super::job::{Job, say};
use crate::models::transformer::Transformer;
use crate::nmt::{Bitext, Codecs, NmtConfig, transformer};
use crate::weights;
use trainer::trainer;

pub(super) use args::NmtArgs;

/// Trains as NJUNMT's command line says.
pub(super) fn run(args: NmtArgs) -> anyhow::Result<()> {
    keep_freed_memory();
    flush_denormals(true)?;
    run_configured(args.config())
}

/// Trains as a configuration says.
pub(super) fn run_file(args: &TrainArgs) -> anyhow::Result<()> {
    let config = match args.verify_parity {
        None => NmtConfig::load(Some(&args.run.cfg), &args.run.pairs).map_err(Into::into),
        Some(_) => Err(anyhow!("--verify-parity is for images; try without")),
    };
    run_configured(config)
}

/// What every rank finds out alone.
struct Checked {
    config: NmtConfig,
    codecs: Codecs,
    train: Bitext,
    valid: Option<Bitext>,
}

impl Checked {
    fn new(config: anyhow::Result<NmtConfig>) -> anyhow::Result<Self> {
        let config = config?;
        device(config.run.device, 0)?;
        let codecs = Codecs::read(&config)?;
        let train = Bitext::of_training(&config, &codecs)?;
        let valid = Bitext::of_validation(&config, &codecs)?;
        Ok(Self { config, codecs, train, valid })
    }

    /// What all ranks must have in common, for their plans to be the same.
    fn print(&self) -> (u32, Option<u32>) {
        (self.train.corpus().fingerprint(), self.valid.as_ref().map(|valid| valid.corpus().fingerprint()))
    }
}

fn run_configured(config: anyhow::Result<NmtConfig>) -> anyhow::Result<()> {
    let job = Job::join()?;
    let checked = job.agree(Checked::new(config))?;
    job.say_hello();
    same_text(&job, &checked)?;
    let run = &checked.config.run;
    job.agree(if job.is_first() { prepare_folders(&checked.config) } else { Ok(()) })?;
    if job.is_first() {
        tell(&checked);
    }
    let found = match run.reload {
        true => Checkpoints::new(&run.saveto).load_latest(&job.group)?,
        false => None,
    };
    if let Some(found) = found.as_ref().filter(|found| is_over(found, &checked.config)) {
        if job.is_first() {
            say(&nothing_left(found, &checked.config));
        }
        return Ok(());
    }
    train(&job, &checked, found)
}

fn same_text(job: &Job, checked: &Checked) -> anyhow::Result<()> {
    let all = job.group.all_gather_object(&checked.print())?;
    let other = all.iter().position(|print| *print != all[0]);
    job.agree(other.map_or(Ok(()), |rank| {
        bail!(
            "rank {rank} has other text than rank 0 in data_configs.train_data or valid_data; try the same files on all nodes"
        )
    }))
}

fn prepare_folders(config: &NmtConfig) -> anyhow::Result<()> {
    let run = &config.run;
    let folders = [("saveto", &run.saveto), ("log_path", &run.log_path), ("valid_path", &run.valid_path)];
    for (name, folder) in
        folders.into_iter().chain(run.shared_dir.as_ref().map(|folder| ("shared_dir", folder)))
    {
        check_writable(name, folder)?;
    }
    let is_new = run.saveto.join("latest").symlink_metadata().is_err();
    ensure!(
        run.reload || is_new,
        "{} has checkpoints of another training; try --reload to go on from the last (run_configs.reload True), or another \
         saveto",
        run.saveto.display()
    );
    Ok(())
}

/// What the texts are, once.
fn tell(checked: &Checked) {
    let named = [("train", Some(&checked.train)), ("valid", checked.valid.as_ref())];
    for (name, text) in named.into_iter().filter_map(|(name, text)| Some((name, text?))) {
        let left_out = text.corpus().left_out();
        let note = if left_out.is_none() { String::new() } else { format!("; {left_out}") };
        say(&format!("[data] == {name}: {} pairs{note} ==", text.corpus().len()));
    }
}

fn is_over(found: &Loaded, config: &NmtConfig) -> bool {
    let training = &config.training;
    found.state.epoch >= training.max_epochs
        || training.max_steps.is_some_and(|most| found.state.step >= most)
}

fn nothing_left(found: &Loaded, config: &NmtConfig) -> String {
    format!(
        "[resume] == nothing left to do after step {}, {} epochs in {}; try a larger training_configs.max_epochs or max_steps ==",
        found.state.step,
        found.state.epoch,
        config.run.saveto.display()
    )
}

fn train(job: &Job, checked: &Checked, found: Option<Loaded>) -> anyhow::Result<()> {
    let config = &checked.config;
    let device = job.agree(device(config.run.device, job.local_rank))?;
    tch::manual_seed(config.training.seed as i64);
    let store = VarStore::new(device);
    let net = job.agree(first_model(checked, &store))?;
    let trainer = job.agree(trainer(job, checked, &net, &store))?;
    let trainer = match found {
        Some(found) => trainer.resume_with(found),
        None => trainer,
    };
    let outcome = trainer.train(LoadBestModel::No)?;
    if job.is_first() {
        say(&last_words(config, &outcome));
    }
    match (job.signal_that_ended_it(), outcome.end) {
        (Some(signal), End::Stopped { .. }) => Err(Stopped { signal }.into()),
        _ => Ok(()),
    }
}

fn first_model(checked: &Checked, store: &VarStore) -> anyhow::Result<Transformer> {
    let net = transformer(&checked.config, &checked.codecs, store)?;
    if let Some(path) = &checked.config.run.pretrain_path {
        weights::load(store, &weights_file(path)?)?;
    }
    Ok(net)
}

/// The weights that a path names: a file, a checkpoint, or a folder of checkpoints, of which the best is meant, or the last.
pub(super) fn weights_file(path: &Path) -> anyhow::Result<PathBuf> {
    const MODEL: &str = "model.safetensors";
    let places =
        [path.to_owned(), path.join(MODEL), path.join("best").join(MODEL), path.join("latest").join(MODEL)];
    places.into_iter().find(|place| place.is_file()).with_context(|| {
        format!(
            "no weights in {}; try a .safetensors file, a checkpoint, or the folder of a training's checkpoints",
            path.display()
        )
    })
}

fn last_words(config: &NmtConfig, outcome: &TrainOutcome) -> String {
    let (name, folder, step) = (&config.run.model_name, config.run.saveto.display(), outcome.steps);
    let best = match (outcome.best_metric, outcome.best_step) {
        (Some(bleu), Some(step)) => format!("; best BLEU {bleu:.2} after step {step}"),
        _ => String::new(),
    };
    match &outcome.end {
        End::Stopped { reason } => {
            format!(
                "[stop] == {name}: {reason} after step {step}{best}; the same command with reload goes on from {folder} =="
            )
        }
        End::Finished => format!("[done] == {name}: {step} steps{best}; checkpoints are in {folder} =="),
    }
}
