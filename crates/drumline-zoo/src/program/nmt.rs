//! `drumline-train nmt`, and `train` with NJUNMT's configuration: translation, from text files to a trained Transformer.

mod args;
mod trainer;

use std::path::{Path, PathBuf};

use anyhow::{bail, ensure};
use drumline::checkpoint::{Checkpoints, Loaded};
use drumline::ensure_alike;
use drumline::trainer::{End, LoadBestModel, TrainOutcome, was_evaluated};
use drumline_observe::bar::Progress;
use drumline_torch::{flush_denormals, keep_freed_memory};
use serde_json::Value as Json;
use tch::nn::VarStore;

use super::args::{RunArgs, TrainArgs};
use super::checked::{check_device, check_writable, checksum};
use super::ending::Stopped;
use super::job::{Job, say};
use super::resumed::{Change, changes, is_within_epoch};
use crate::config::table;
use crate::models::transformer::Transformer;
use crate::nmt::config::RunConfigs;
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
    run_configured(load_file(args))
}

/// The configuration that the command line asks for.
pub(super) fn load_file(args: &TrainArgs) -> anyhow::Result<NmtConfig> {
    ensure!(args.verify_parity.is_none(), "--verify-parity is for images; try without");
    load(&args.run)
}

/// An error if the configuration is wrong, or files that it names are not there.
pub(super) fn check(config: anyhow::Result<NmtConfig>) -> anyhow::Result<()> {
    check_files(&config?)
}

fn load(args: &RunArgs) -> anyhow::Result<NmtConfig> {
    let mut config = NmtConfig::load(Some(&args.cfg), &args.pairs)?;
    config.run.device = args.device.unwrap_or(config.run.device);
    Ok(config)
}

/// What may be the matter with a path.
fn hint(file: &Path) -> &'static str {
    match file.starts_with("data/translation") {
        true => "; drumline data synth-translation --out data/translation makes the example's files",
        false if file.is_relative() => "; paths begin in the folder in which the command is started",
        false => "",
    }
}

/// Whether the files that a configuration names are there.
fn check_files(config: &NmtConfig) -> anyhow::Result<()> {
    for file in config.data.train_data.iter().chain(&config.data.valid_data) {
        ensure!(file.is_file(), "data_configs: no file {}{}", file.display(), hint(file));
    }
    for (key, file) in config.data.vocabularies.iter().map(|keys| ("dict_path", &keys.dict_path)) {
        ensure!(
            file.is_file(),
            "data_configs.vocabularies: cannot read the vocabulary, {key} {}: no such file; try drumline data vocabulary \
             TEXT --out FILE, which counts the words of a text{}",
            file.display(),
            hint(file)
        );
    }
    Ok(())
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
        check_device(config.run.device)?;
        check_files(&config)?;
        let codecs = Codecs::read(&config)?;
        let train = Bitext::of_training(&config, &codecs)?;
        let valid = Bitext::of_validation(&config, &codecs)?;
        Ok(Self { config, codecs, train, valid })
    }

    /// What all ranks must have in common, or their steps would not be the same.
    fn given(&self) -> anyhow::Result<Vec<(String, String)>> {
        let own = [
            "run_configs.",
            "data_configs.train_data",
            "data_configs.valid_data",
            "data_configs.bleu_valid_reference",
        ];
        let is_own =
            |key: &str| own.iter().any(|own| key.starts_with(own)) || key == "data_configs.vocabularies";
        let keys = self.config.entries().into_iter().filter(|entry| !is_own(&entry.key));
        let mut given: Vec<_> = keys.map(|entry| (entry.key, entry.value.to_string())).collect();
        let mut add = |name: &str, value: String| given.push((name.to_owned(), value));
        add("the text of train_data", self.train.corpus().fingerprint().to_string());
        let valid = self.valid.as_ref().map(|valid| valid.corpus().fingerprint());
        add("the text of valid_data", format!("{valid:?}"));
        add(WORDS, self.words()?);
        add("a shared_dir", self.config.run.shared_dir.is_some().to_string());
        add("a reload", format!("{:?}", self.config.run.reload));
        Ok(given)
    }

    /// Checksums of all that makes ids of words.
    fn words(&self) -> anyhow::Result<String> {
        let vocabularies = self.config.data.vocabularies.iter();
        let files = vocabularies.flat_map(|keys| std::iter::once(&keys.dict_path).chain(&keys.codes));
        let sums: Vec<_> =
            files.map(|file| checksum(file).map(|sum| format!("{sum:08x}"))).collect::<Result<_, _>>()?;
        Ok(sums.join(" "))
    }

    /// What a checkpoint keeps of vocabularies, beside the keys.
    fn print(&self) -> anyhow::Result<(String, Json)> {
        Ok((WORDS.to_owned(), self.words()?.into()))
    }
}

fn run_configured(config: anyhow::Result<NmtConfig>) -> anyhow::Result<()> {
    let job = Job::join()?;
    let checked = job.agree(Checked::new(config))?;
    job.say_hello();
    let given = job.agree(checked.given())?;
    ensure_alike(&job.group, "translation", given)?;
    let run = &checked.config.run;
    // A job that its launcher has started again goes on by itself.
    let reload = run.reload.unwrap_or(true) || job.is_restarted;
    job.claim("saveto", &run.saveto)?;
    job.agree(if job.is_first() { prepare_folders(&checked.config, reload) } else { Ok(()) })?;
    if job.is_first() {
        tell(&checked);
    }
    let checkpoints = job.agree(checkpoints(&job, run))?;
    let found = match reload {
        true => checkpoints.load_latest(&job.group)?,
        false => None,
    };
    if let Some(found) = found.as_ref().filter(|found| is_over(found, &checked)) {
        if job.is_first() {
            say(&nothing_left(found, &checked.config));
        }
        return Ok(());
    }
    job.agree(found.as_ref().map_or(Ok(()), |found| same_plan(found, &checked)))?;
    train(&job, &checked, (found, checkpoints))
}

/// The run's checkpoints, whose warnings go into its log.
fn checkpoints(job: &Job, run: &RunConfigs) -> anyhow::Result<Checkpoints> {
    let checkpoints = Checkpoints::new(&run.saveto);
    if !job.is_first() {
        return Ok(checkpoints);
    }
    let log = Progress::lines(1).log_to(&run.log_path)?;
    Ok(checkpoints.on_warning(move |line| log.note(line)))
}

/// Keys that say which sentences make a batch.
const PLAN: [&str; 6] = [
    "training_configs.batch_size",
    "training_configs.batching_key",
    "training_configs.use_bucket",
    "training_configs.buffer_size",
    "training_configs.shuffle",
    "data_configs.max_len",
];

/// In a checkpoint's configuration: of vocabularies and codes.
const WORDS: &str = "the vocabularies";

/// Words must have the ids that they had, and a checkpoint within an epoch, which says how many batches were seen, must go on with the same ones.
fn same_plan(found: &Loaded, checked: &Checked) -> anyhow::Result<()> {
    let (path, is_within_epoch) = (found.path.display(), is_within_epoch(found)?);
    for Change { key, saved, now } in
        changes(found, table::to_json(&checked.config).chain([checked.print()?]))
    {
        match key.as_str() {
            WORDS => bail!(
                "{path} was trained with other words in data_configs.vocabularies; try those in {}",
                checked.config.run.saveto.display()
            ),
            key if is_within_epoch && PLAN.contains(&key) => bail!(
                "{path} is in the middle of an epoch: {key} was {saved}, and is {now} now, so that other sentences would \
                 make a batch; try {saved} up to the end of the epoch, or another saveto with pretrain_path {path}"
            ),
            _ => {}
        }
    }
    Ok(())
}

fn prepare_folders(config: &NmtConfig, reload: bool) -> anyhow::Result<()> {
    let run = &config.run;
    let folders = [("log_path", &run.log_path), ("valid_path", &run.valid_path)];
    for (name, folder) in
        folders.into_iter().chain(run.shared_dir.as_ref().map(|folder| ("shared_dir", folder)))
    {
        check_writable(name, folder)?;
    }
    let is_new = run.saveto.join("latest").symlink_metadata().is_err();
    ensure!(
        reload || is_new,
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

/// Whether the checkpoint is that of the last step, with its validation.
fn is_over(found: &Loaded, checked: &Checked) -> bool {
    let training = &checked.config.training;
    if checked.valid.is_some() && !was_evaluated(found) {
        return false;
    }
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

fn train(
    job: &Job,
    checked: &Checked,
    (found, checkpoints): (Option<Loaded>, Checkpoints),
) -> anyhow::Result<()> {
    let config = &checked.config;
    let device = job.device(config.run.device)?;
    tch::manual_seed(config.training.seed as i64);
    let store = VarStore::new(device);
    let net = job.agree(first_model(checked, &store))?;
    let trainer = job.agree(trainer(job, checked, &net, &store))?.save_path(checkpoints);
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

/// The weights that a path names: a file, a checkpoint, a folder of checkpoints, of which the best is meant (or the last where the run
/// has evaluated none), or the run's folder, which is one above.
pub(super) fn weights_file(path: &Path) -> anyhow::Result<PathBuf> {
    if let Some(file) = weights_in(path)? {
        return Ok(file);
    }
    let mut below = Vec::new();
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    for folder in entries.map(|entry| entry.path()).filter(|path| path.is_dir()) {
        below.extend(weights_in(&folder)?);
    }
    below.sort();
    match below.as_slice() {
        [file] => Ok(file.clone()),
        [] => bail!(
            "no weights in {} or one level down; try a .safetensors file, a checkpoint, or the folder of a training's checkpoints",
            path.display()
        ),
        [first, second, ..] => bail!(
            "several weights below {}, such as {} and {}; try the path of one",
            path.display(),
            first.display(),
            second.display()
        ),
    }
}

fn weights_in(path: &Path) -> anyhow::Result<Option<PathBuf>> {
    let places = [path.to_owned(), path.join("model.safetensors")];
    match places.into_iter().find(|place| place.is_file()) {
        Some(file) => Ok(Some(file)),
        None => Ok(Checkpoints::new(path).read_only().model_file()?),
    }
}

fn last_words(config: &NmtConfig, outcome: &TrainOutcome) -> String {
    let (name, folder, step) = (&config.run.model_name, config.run.saveto.display(), outcome.steps);
    let best = match (outcome.best_metric, outcome.best_step) {
        (Some(bleu), Some(step)) => format!("; best BLEU {bleu:.2} after step {step}"),
        _ => String::new(),
    };
    let how = if config.run.reload == Some(false) { " with --reload" } else { "" };
    match &outcome.end {
        End::Stopped { reason } if reason.starts_with("early stop") => {
            format!("[done] == {name}: {reason} after step {step}{best}; checkpoints are in {folder} ==")
        }
        End::Stopped { reason } => {
            format!(
                "[stop] == {name}: {reason} after step {step}{best}; the same command{how} resumes from {folder} =="
            )
        }
        End::Finished => format!("[done] == {name}: {step} steps{best}; checkpoints are in {folder} =="),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_found_one_level_down_if_there_is_one() {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("nmt");
        let model = |path: &str| run.join(path).join("model.safetensors");
        let make = |path: &str| {
            std::fs::create_dir_all(run.join(path)).unwrap();
            std::fs::write(model(path), "").unwrap();
        };
        std::fs::create_dir_all(run.join("log")).unwrap();
        let said = weights_file(&run).unwrap_err().to_string();
        assert!(said.contains("or one level down; try"), "{said}");
        make("step-3");
        assert_eq!(weights_file(&run).unwrap(), model("step-3"));
        assert_eq!(weights_file(&run.join("step-3")).unwrap(), model("step-3"), "control: named itself");
        assert!(weights_file(folder.path()).is_err(), "not two levels down");
        make("step-4");
        let said = weights_file(&run).unwrap_err().to_string();
        assert!(said.contains("several weights") && said.contains("try the path of one"), "{said}");
    }
}
