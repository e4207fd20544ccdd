//! Translation as a task of the driver.

use std::path::Path;
use std::rc::Rc;

use anyhow::{Context, bail, ensure};
use drumline::comm::Exchange;
use drumline::data::{Cause, Sampler};
use drumline::trainer::{Every, MovingAverage, TrainState};
use drumline_files::{Durability, replace};
use drumline_torch::{AdagradOptions, AdamOptions, SgdOptions};
use serde_json::Value as Json;
use tch::Device;
use tch::nn::VarStore;

use super::bitext::{Bitext, Codecs, NumberedPairs};
use super::bleu::Bleu;
use super::config::{MovingAverageMethod, NmtConfig};
use super::loss::{TargetWords, TranslationLoss};
use super::net::options_of;
use super::schedule::with_learning_rate;
use super::validation::{Due, Validation};
use crate::config::table;
use crate::driver::{Job, changes, checksum};
use crate::models::transformer::{self, Transformer};
use crate::models::{Net, StagedNet, logits_of};
use crate::optimizer::OptimizerOptions;
use crate::task::{
    Built, DataSets, Evaluated, Folders, Keep, ModelPlace, Place, Purpose, ReportStyle, ResumeMode, Start,
    Task, TestData, Trainer,
};
use crate::weights;
use crate::weights_file::weights_file;
use crate::words::OfWords;

/// The resolved configuration, beside the checkpoints.
pub(crate) const CONFIG: &str = "config.yaml";

/// The per-step metric that counts target words.
const TARGET_WORDS: &str = "words";

/// The entry of a checkpoint's configuration with the checksums of vocabularies and codes.
const VOCABULARIES: &str = "the vocabularies";

const REPORT_STYLE: ReportStyle = ReportStyle {
    samples: "pairs",
    rate: "words/s",
    counted: target_words,
    has_accuracy: false,
    lr_digits: 6,
    metric: |name| (name != "loss").then(|| name.to_owned()),
    nan_advice: "a smaller optimizer_configs.learning_rate, or more scheduler_configs.warmup_steps",
    finished_advice: "a larger training_configs.max_epochs or max_steps",
};

fn target_words(state: &TrainState) -> u64 {
    state.train_metrics().iter().find(|(name, _)| name == TARGET_WORDS).map_or(0, |(_, words)| *words as u64)
}

/// A Transformer that translates.
pub(crate) struct NmtTask {
    config: NmtConfig,
    purpose: Purpose,
    texts: Option<ParallelTexts>,
}

/// The texts that every rank reads by itself.
struct ParallelTexts {
    codecs: Codecs,
    /// The training text; `None` in a test.
    train: Option<Bitext>,
    valid: Option<Bitext>,
}

impl NmtTask {
    fn texts(&self) -> anyhow::Result<&ParallelTexts> {
        self.texts.as_ref().context("the texts are not open")
    }

    /// The checksums of all vocabulary and codes files.
    fn vocabularies(&self) -> anyhow::Result<String> {
        let vocabularies = self.config.data.vocabularies.iter();
        let files = vocabularies.flat_map(|keys| std::iter::once(&keys.dict_path).chain(&keys.codes));
        let sums: Vec<_> =
            files.map(|file| checksum(file).map(|sum| format!("{sum:08x}"))).collect::<Result<_, _>>()?;
        Ok(sums.join(" "))
    }

    /// Returns an error if a word would have another id than in the run's weights.
    fn check_vocabularies(&self, start: Start<'_>) -> anyhow::Result<()> {
        let Start::Resumed(found) = start else { return Ok(()) };
        let now = [(VOCABULARIES.to_owned(), Json::from(self.vocabularies()?))];
        if changes(found, now).next().is_some() {
            bail!(
                "{} was trained with another vocabulary than data_configs.vocabularies; try those in {}",
                found.path.display(),
                self.config.run.saveto.display()
            );
        }
        Ok(())
    }

    fn bleu<'a>(&self, evaluated: &Evaluated<'a, Self>) -> anyhow::Result<Bleu<'a>> {
        let ParallelTexts { codecs, valid, .. } = self.texts()?;
        let valid = valid.as_ref().context("there is no valid_data")?;
        let model = evaluated.model.whole().context("a model that is cut into stages does not translate")?;
        let bleu = Bleu::new(model, &self.config, valid, codecs)?;
        Ok(if evaluated.place.rank == 0 { bleu.counting_left_out()? } else { bleu })
    }

    /// A callback that validates by loss and by BLEU, each at its own interval, and writes translations.
    fn validation(&self, bleu: &Bleu<'_>) -> Validation {
        Validation {
            due: Due::new(&self.config),
            max_steps: self.config.training.max_steps,
            round: Rc::clone(&bleu.round),
            exchange: Exchange::by(self.config.run.shared_dir.as_deref()),
            folder: self.config.run.valid_path.clone(),
            lines: bleu.valid.corpus().left_out().of,
            last: None,
        }
    }
}

/// Returns an error if a file that the configuration names does not exist.
fn check_files(config: &NmtConfig) -> anyhow::Result<()> {
    for file in config.data.train_data.iter().chain(&config.data.valid_data) {
        ensure!(file.is_file(), "data_configs: no file {}{}", file.display(), hint(file));
    }
    for file in config.data.vocabularies.iter().map(|keys| &keys.dict_path) {
        ensure!(
            file.is_file(),
            "data_configs.vocabularies: cannot read the vocabulary, dict_path {}: no such file; try drumline data vocabulary \
             TEXT --out FILE, which counts the words of a text{}",
            file.display(),
            hint(file)
        );
    }
    Ok(())
}

/// A likely reason for a path that does not exist.
fn hint(file: &Path) -> &'static str {
    if file.starts_with("data/translation") {
        "; drumline data synth-translation --out data/translation makes the example's files"
    } else if file.is_relative() {
        "; paths begin in the folder in which the command is started"
    } else {
        ""
    }
}

/// A line about the size of a text.
fn note(name: &str, text: &Bitext) -> String {
    let left_out = text.corpus().left_out();
    let note = if left_out.is_none() { String::new() } else { format!("; {left_out}") };
    format!("[data] == {name}: {} pairs{note} ==", text.corpus().len())
}

impl Task for NmtTask {
    type Config = NmtConfig;
    type Batch = NumberedPairs;
    type Data = Bitext;
    type Model = Net<Transformer, NumberedPairs>;

    const REPORT_STYLE: ReportStyle = REPORT_STYLE;
    const BATCH_KEYS: &'static [&'static str] = &[
        "training_configs.batch_size",
        "training_configs.batching_key",
        "training_configs.use_bucket",
        "training_configs.buffer_size",
        "training_configs.shuffle",
        "data_configs.max_len",
    ];
    const HOST_KEYS: &'static [&'static str] = &[
        "run_configs.",
        "data_configs.train_data",
        "data_configs.valid_data",
        "data_configs.bleu_valid_reference",
        "data_configs.vocabularies",
    ];
    const MODEL_KEYS: &'static [&'static str] = &["run_configs.precision", "model_configs."];
    const WEIGHTS_KEY: &'static str = "run_configs.pretrain_path";

    fn new(config: NmtConfig, purpose: Purpose) -> anyhow::Result<Self> {
        check_files(&config)?;
        let can_evaluate = purpose == Purpose::Train || !config.data.valid_data.is_empty();
        ensure!(can_evaluate, "data_configs.valid_data is not given; try two files");
        Ok(Self { config, purpose, texts: None })
    }

    fn config(&self) -> &NmtConfig {
        &self.config
    }

    fn name(&self) -> Option<&str> {
        Some(&self.config.run.model_name)
    }

    fn open(&mut self) -> anyhow::Result<()> {
        let codecs = Codecs::read(&self.config)?;
        let train = match self.purpose {
            Purpose::Train => Some(Bitext::of_training(&self.config, &codecs)?),
            Purpose::Test => None,
        };
        let valid = Bitext::of_validation(&self.config, &codecs)?;
        self.texts = Some(ParallelTexts { codecs, train, valid });
        Ok(())
    }

    fn folders(&self) -> Folders {
        let run = &self.config.run;
        let shared_dir = run.shared_dir.iter().map(|folder| ("shared_dir", folder.clone()));
        let others = [("log_path", run.log_path.clone()), ("valid_path", run.valid_path.clone())];
        Folders {
            own: run.saveto.clone(),
            key: "saveto",
            checkpoints: run.saveto.clone(),
            log: run.log_path.clone(),
            others: others.into_iter().chain(shared_dir).collect(),
        }
    }

    fn resume_mode(&self) -> ResumeMode {
        if self.config.run.reload.unwrap_or(true) { ResumeMode::Auto } else { ResumeMode::AfterRestart }
    }

    fn fingerprints(&self) -> anyhow::Result<Vec<(String, String)>> {
        let ParallelTexts { train, valid, .. } = self.texts()?;
        let print = |text: &Option<Bitext>| text.as_ref().map(|text| text.corpus().fingerprint());
        let run = &self.config.run;
        let given = [
            ("the text of train_data", format!("{:?}", print(train))),
            ("the text of valid_data", format!("{:?}", print(valid))),
            (VOCABULARIES, self.vocabularies()?),
            ("a shared_dir", run.shared_dir.is_some().to_string()),
            ("a reload", format!("{:?}", run.reload)),
        ];
        Ok(given.map(|(name, value)| (name.to_owned(), value)).to_vec())
    }

    fn entries(&self) -> anyhow::Result<Vec<(String, Json)>> {
        let vocabularies = (VOCABULARIES.to_owned(), self.vocabularies()?.into());
        Ok(table::to_json(&self.config).chain([vocabularies]).collect())
    }

    fn meet(&mut self, job: &Job, start: Start<'_>) -> anyhow::Result<()> {
        job.agree(self.check_vocabularies(start))
    }

    fn evaluates(&self) -> bool {
        !self.config.data.valid_data.is_empty()
    }

    fn best_by(&self) -> String {
        if self.config.parallel.pp > 1 { "ppl" } else { "bleu" }.to_owned()
    }

    fn disable_dropout(&mut self) -> bool {
        std::mem::take(&mut self.config.model.dropout) > 0.0
    }

    fn model(&self, store: &VarStore, place: ModelPlace<'_>) -> anyhow::Result<Built<Self::Model>> {
        let options = options_of(&self.config, &self.texts()?.codecs);
        let model = match place.stages(store, || transformer::layers(place.ranks, &options))? {
            Some(stages) => {
                let output = logits_of(options.classes(place.ranks));
                Net::Stages(StagedNet { stages, inputs: NumberedPairs::inputs, output })
            }
            None => Net::Whole(Transformer::on(place.ranks, &store.root(), &options)?),
        };
        if let Some(path) = &self.config.run.pretrain_path {
            weights::load_parts(store, &model.holding(place.ranks), &weights_file(path)?)?;
        }
        Ok(Built::new(Box::new(model)))
    }

    fn train_data(&self, device: Device) -> anyhow::Result<DataSets<Bitext>> {
        let ParallelTexts { train, valid, .. } = self.texts()?;
        let train = train.clone().context("a test has no training text")?;
        let mut notes = vec![note("train", &train)];
        notes.extend(valid.as_ref().map(|valid| note("valid", valid)));
        notes.extend(self.config.model.checkpoint.note(device));
        if self.config.parallel.pp > 1 && valid.is_some() {
            let note = "[init] == validations have no BLEU: a model that is cut into stages does not translate; perplexity selects \
                        the best ==";
            notes.push(note.to_owned());
        }
        Ok(DataSets { train, dev: valid.clone(), notes })
    }

    fn test_data(&self, _: Device) -> anyhow::Result<TestData<Bitext>> {
        let data = self.texts()?.valid.clone().context("valid_data was checked")?;
        let notes = vec![note("valid", &data)];
        Ok(TestData { data, notes })
    }

    fn sampler(&self, data: &Bitext, place: Place, _: u64) -> anyhow::Result<Box<dyn Sampler>> {
        Ok(Box::new(data.train_sampler(&self.config, place)?))
    }

    fn dev_sampler(&self, data: &Bitext, place: Place) -> anyhow::Result<Option<Box<dyn Sampler>>> {
        Ok(Some(Box::new(data.valid_sampler(&self.config, place)?)))
    }

    fn with_loss<'a>(&self, trainer: Trainer<'a, Self>, _: &Self::Model) -> Trainer<'a, Self> {
        trainer.loss(TranslationLoss::new(&self.config)).train_metric(TARGET_WORDS, TargetWords::default())
    }

    /// Adds perplexity and BLEU. BLEU selects the best model. A model that is cut into stages does not translate, and its
    /// perplexity selects.
    fn with_metrics<'a>(
        &self,
        trainer: Trainer<'a, Self>,
        evaluated: Evaluated<'a, Self>,
    ) -> anyhow::Result<Trainer<'a, Self>> {
        let trainer = trainer.metric("ppl", OfWords::perplexity());
        if evaluated.model.stages().is_some() {
            let every = Every::Steps(self.config.training.loss_valid_freq);
            return Ok(trainer.metric_key("-ppl").validate_every(every));
        }
        let bleu = self.bleu(&evaluated)?;
        let trainer = trainer.metric_key("bleu");
        Ok(match evaluated.purpose {
            Purpose::Train => {
                let validation = self.validation(&bleu);
                trainer.metric("bleu", bleu).validate_every(Every::Never).callback(validation)
            }
            Purpose::Test => {
                bleu.round.translates.set(true);
                trainer.metric("bleu", bleu)
            }
        })
    }

    fn optimizer(&self) -> OptimizerOptions {
        let (keys, params) = (&self.config.optimizer, &self.config.optimizer_params);
        let (lr, weight_decay, momentum) = (keys.learning_rate, keys.weight_decay, params.momentum);
        let (betas, eps) = ((params.betas[0], params.betas[1]), params.eps);
        OptimizerOptions {
            adam: AdamOptions {
                lr,
                betas,
                eps,
                weight_decay: Some(weight_decay),
                amsgrad: params.amsgrad,
                ..AdamOptions::default()
            },
            adagrad: AdagradOptions { lr, eps, weight_decay, ..AdagradOptions::default() },
            sgd: SgdOptions { lr, weight_decay, momentum, ..SgdOptions::default() },
            ..OptimizerOptions::named(keys.optimizer, lr, weight_decay)
        }
    }

    fn with_schedule<'a>(&self, trainer: Trainer<'a, Self>) -> anyhow::Result<Trainer<'a, Self>> {
        let training = &self.config.training;
        let trainer = with_learning_rate(trainer, &self.config)?;
        let average = match training.moving_average_method {
            None => return Ok(trainer),
            Some(MovingAverageMethod::Sma) => MovingAverage::sma(),
            Some(MovingAverageMethod::Ema) => MovingAverage::ema(training.moving_average_alpha),
        };
        Ok(trainer.callback(average.from_epoch(training.moving_average_start_epoch)))
    }

    /// Writes the configuration and copies the vocabularies, without which a model cannot be used.
    fn save_beside(&self, _: bool) -> Result<(), Cause> {
        let folder = &self.config.run.saveto;
        let (config, copies) = self.config.kept_in(folder);
        for (from, to) in copies.iter().filter(|(from, to)| from != to) {
            replace(to, std::fs::read(from)?, Durability::Process)?;
        }
        Ok(replace(folder.join(CONFIG), config.to_yaml(), Durability::Process)?)
    }

    fn checkpoints_kept(&self) -> Option<Keep> {
        let training = &self.config.training;
        Some(Keep { last: training.num_kept_checkpoints, best: training.num_kept_best_model })
    }

    fn first_weights(&self) -> Option<&Path> {
        self.config.run.pretrain_path.as_deref()
    }
}
