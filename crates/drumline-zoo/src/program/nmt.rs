//! `drumline-train nmt`, and `train` with NJUNMT's configuration: translation, from text files to a trained Transformer.

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use clap::Args;
use drumline::checkpoint::{Checkpoints, Loaded};
use drumline::trainer::{
    CallbackResult, Checkpoint, DistTrainer, EarlyStop, End, EventFile, Every, GradientClip, LoadBestModel,
    MasterCallback, MovingAverage, RankFiles, StopOnNan, TensorBoard, TrainOutcome, TrainState,
};
use drumline::{Exchange, Perplexity};
use drumline_torch::{flush_denormals, keep_freed_memory};
use tch::nn::VarStore;

use super::checked::{check_writable, device};
use super::ending::Stopped;
use super::job::{Job, say};
use crate::config::{DeviceKind, table};
use crate::models::transformer::Transformer;
use crate::nmt::config::MovingAverageMethod;
use crate::nmt::{
    Bitext, Bleu, Codecs, Due, NmtConfig, NmtTrainer, TranslationLoss, Validation, WordsPerSecond,
    transformer, with_learning_rate, with_optimizer,
};
use crate::weights;

const EXAMPLES: &str = "\
Examples:
  drumline data synth-translation --out data/translation
  drumline run --nproc-per-node 2 -- drumline-train nmt --config_path config/nmt.yaml --saveto exp/save --log_path exp/log --valid_path exp/valid
  drumline run --nproc-per-node 2 -- drumline-train nmt --config_path config/nmt.yaml --saveto exp/save --reload

The flags are NJUNMT's, with its defaults; drumline train --cfg FILE does the same, with these as keys of run_configs.";

/// Train a translation model with NJUNMT's command line
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct NmtArgs {
    /// The configuration: NJUNMT's YAML
    #[arg(long = "config_path", alias = "config-path", alias = "cfg", value_name = "FILE")]
    config_path: PathBuf,
    /// Name of the model, in what is shown
    #[arg(long = "model_name", alias = "model-name", value_name = "NAME")]
    model_name: Option<String>,
    /// Go on from the last checkpoint in --saveto
    #[arg(long)]
    reload: bool,
    /// Folder of metrics.jsonl, log.txt and TensorBoard's files [default: ./log]
    #[arg(long = "log_path", alias = "log-path", value_name = "DIR")]
    log_path: Option<PathBuf>,
    /// Folder of checkpoints [default: ./save]
    #[arg(long, value_name = "DIR")]
    saveto: Option<PathBuf>,
    /// Folder of translations made in validations [default: ./valid]
    #[arg(long = "valid_path", alias = "valid-path", value_name = "DIR")]
    valid_path: Option<PathBuf>,
    /// Weights to begin with: a .safetensors file, or a checkpoint
    #[arg(long = "pretrain_path", alias = "pretrain-path", value_name = "PATH")]
    pretrain_path: Option<PathBuf>,
    /// Compute on GPUs, the one that LOCAL_RANK names
    #[arg(long = "use_gpu", alias = "use-gpu")]
    use_gpu: bool,
    /// Exchange large objects through files in this folder, which all ranks see [default: from rank to rank]
    #[arg(long = "shared_dir", alias = "shared-dir", value_name = "DIR")]
    shared_dir: Option<PathBuf>,
    /// What NJUNMT's launcher adds; the number of ranks says it already
    #[arg(long = "multi_gpu", alias = "multi-gpu", hide = true)]
    _multi_gpu: bool,
    /// Keys of the configuration with their values, which win over the file
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_names = ["KEY", "VALUE"])]
    pairs: Vec<String>,
}

impl NmtArgs {
    fn config(self) -> anyhow::Result<NmtConfig> {
        let mut config = NmtConfig::load(Some(&self.config_path), &self.pairs)?;
        let run = &mut config.run;
        (run.reload, run.device) =
            (self.reload, if self.use_gpu { DeviceKind::Cuda } else { DeviceKind::Cpu });
        run.model_name = self.model_name.unwrap_or_else(|| run.model_name.clone());
        let folders = [
            (&mut run.log_path, self.log_path),
            (&mut run.saveto, self.saveto),
            (&mut run.valid_path, self.valid_path),
        ];
        for (folder, given) in folders {
            *folder = given.unwrap_or_else(|| folder.clone());
        }
        run.pretrain_path = self.pretrain_path.or(run.pretrain_path.take());
        run.shared_dir = self.shared_dir.or(run.shared_dir.take());
        Ok(config)
    }
}

/// Trains as NJUNMT's command line says.
pub(super) fn run(args: NmtArgs) -> anyhow::Result<()> {
    run_configured(args.config())
}

/// Trains as a configuration says.
pub(super) fn run_file<S: AsRef<str>>(file: &Path, pairs: &[S]) -> anyhow::Result<()> {
    run_configured(NmtConfig::load(Some(file), pairs).map_err(Into::into))
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
    keep_freed_memory();
    flush_denormals(true)?;
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

/// The trainer that the configuration asks for, by the rank alone.
fn trainer<'a>(
    job: &Job,
    checked: &Checked,
    net: &'a Transformer,
    store: &'a VarStore,
) -> anyhow::Result<NmtTrainer<'a>> {
    let config = &checked.config;
    let (training, run) = (&config.training, &config.run);
    let since = Rc::new(Cell::new(Instant::now()));
    let sampler = checked.train.train_sampler(config, &job.group).map_err(anyhow::Error::from_boxed)?;
    let trainer = DistTrainer::new(&job.group, net, store, checked.train.clone())
        .loss(TranslationLoss::new(config))
        .sampler(sampler)
        .train_metric("words_per_s", WordsPerSecond::new(Rc::clone(&since)))
        .stop_request(job.stop.clone())
        .callback(StopOnNan)
        .update_every(training.update_cycle)
        .n_epochs(training.max_epochs)
        .validate_every(Every::Never)
        .num_workers(run.workers)
        .seed(training.seed)
        .print_every(training.disp_freq)
        .save_path(&run.saveto)
        .log_path(&run.log_path)
        .config(table::to_json(config));
    let trainer = with_optimizer(trainer, config, store)?;
    // Callbacks come in this order: gradients are clipped, then the rate of the step is set.
    let trainer = match config.optimizer.grad_clip {
        most if most > 0.0 => trainer.callback(GradientClip::norm(most)),
        _ => trainer,
    };
    let trainer = with_learning_rate(trainer, config)?;
    let trainer = with_average(trainer, config);
    let trainer = match &checked.valid {
        Some(valid) => with_validation(trainer, checked, valid, ValidationParts { job, net, since })?,
        None => trainer,
    };
    let checkpoint = Checkpoint::every(Every::Steps(training.save_freq))
        .keep_last(training.num_kept_checkpoints)
        .keep_best(training.num_kept_best_model.max(1));
    let trainer = trainer.callback(checkpoint);
    Ok(observed(
        match training.max_steps {
            Some(most) => trainer.max_steps(most),
            None => trainer,
        },
        config,
    ))
}

fn with_average<'a>(trainer: NmtTrainer<'a>, config: &NmtConfig) -> NmtTrainer<'a> {
    let training = &config.training;
    let average = match training.moving_average_method {
        None => return trainer,
        Some(MovingAverageMethod::Sma) => MovingAverage::sma(),
        Some(MovingAverageMethod::Ema) => MovingAverage::ema(training.moving_average_alpha),
    };
    trainer.callback(average.from_epoch(training.moving_average_start_epoch))
}

struct ValidationParts<'a, 'j> {
    job: &'j Job,
    net: &'a Transformer,
    since: Rc<Cell<Instant>>,
}

/// By loss, perplexity and BLEU; the best has the best BLEU.
fn with_validation<'a>(
    trainer: NmtTrainer<'a>,
    checked: &Checked,
    valid: &Bitext,
    parts: ValidationParts<'a, '_>,
) -> anyhow::Result<NmtTrainer<'a>> {
    let Checked { config, codecs, .. } = checked;
    let ValidationParts { job, net, since } = parts;
    let bleu = Bleu::new(net, config, valid, codecs)?;
    let bleu = if job.is_first() { bleu.counting_left_out()? } else { bleu };
    let validation = Validation {
        due: Due::new(config),
        max_steps: config.training.max_steps,
        round: Rc::clone(&bleu.round),
        exchange: Exchange::by(config.run.shared_dir.as_deref()),
        folder: config.run.valid_path.clone(),
        lines: valid.corpus().left_out().of,
        since,
        last: None,
    };
    let sampler = valid.valid_sampler(config, &job.group).map_err(anyhow::Error::from_boxed)?;
    Ok(trainer
        .dev_data(valid.clone())
        .dev_sampler(sampler)
        .metric("ppl", Perplexity::default())
        .metric("bleu", bleu)
        .metric_key("bleu")
        .callback(validation)
        .callback(EarlyStop::patience(config.training.early_stop_patience)))
}

/// With those that write what happens.
fn observed<'a>(trainer: NmtTrainer<'a>, config: &NmtConfig) -> NmtTrainer<'a> {
    let run = &config.run;
    trainer
        .callback(RankFiles::in_folder(&run.log_path))
        .master_callback(SaveConfig { folder: run.saveto.clone(), text: config.to_yaml() })
        .master_callback(EventFile::in_folder(&run.log_path))
        .master_callback(TensorBoard::in_folder(run.log_path.join("tensorboard")))
}

/// Writes the resolved configuration beside the checkpoints, once nothing stands against the run.
struct SaveConfig {
    folder: PathBuf,
    text: String,
}

impl MasterCallback for SaveConfig {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        Ok(std::fs::write(self.folder.join(super::translate::CONFIG), &self.text)?)
    }
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
