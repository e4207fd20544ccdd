//! Text classification and tagging as a task of the driver.

use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, ensure};
use drumline::comm::ensure_alike;
use drumline::data::{Cause, Dataset, Sampler};
use drumline::trainer::TrainState;
use drumline_text::{BatchBy, BatchPlan, TextError};
use tch::nn::{ModuleT, VarStore};
use tch::{Device, Tensor};

use super::config::{Text, TextConfig, TextTask};
use super::data::TextData;
use super::figures::{figure_of_step, figures, loss};
use super::lexicon::Lexicon;
use super::net::build;
use super::texts::Texts;
use crate::config::{Test, Train};
use crate::driver::{Job, check_file, check_weights};
use crate::optimizer::{OptimizerOptions, warmup};
use crate::percent::Percent;
use crate::task::{
    Built, DataSets, Evaluated, ModelPlace, Place, Purpose, ReportStyle, Start, Task, TestData, Trainer,
};
use crate::weights;

/// Texts are sorted by length within this many batches. More would need less padding, but an epoch would go from short
/// texts to long ones.
const BUFFER: usize = 16;

/// How notes describe the texts that are left out.
const EMPTY: &str = "empty";

pub(crate) const REPORT_STYLE: ReportStyle = ReportStyle {
    samples: "texts",
    rate: "texts/s",
    counted: TrainState::samples,
    has_accuracy: true,
    lr_digits: 6,
    metric: |name| (name != "loss").then(|| name.to_owned()),
    nan_advice: "a smaller OPTIM.BASE_LR or more OPTIM.WARMUP",
    finished_advice: "a larger OPTIM.MAX_EPOCH or TRAIN.MAX_STEPS",
};

/// A network that labels texts, or each of their words.
pub(crate) struct LabelTask {
    config: TextConfig,
    purpose: Purpose,
    met: Option<Met>,
}

/// What is set up with the other ranks.
struct Met {
    lexicon: Lexicon,
    /// The training or test data.
    data: TextData,
    dev: Option<TextData>,
}

impl LabelTask {
    fn met(&self) -> anyhow::Result<&Met> {
        self.met.as_ref().context("the task is not set up: `meet` was not called")
    }

    /// Reads a file with the run's lexicon.
    fn read(&self, path: &Path, lexicon: &Lexicon, purpose: Purpose) -> Result<TextData, TextError> {
        let TextConfig { text: keys, labels, .. } = &self.config;
        // Evaluations do not cut texts, because each tag counts.
        let is_cut = purpose == Purpose::Train || labels.task == TextTask::Classify;
        let texts = Texts::read(path, keys, labels)?;
        TextData::new(&texts, lexicon, labels.task, keys.max_len.filter(|_| is_cut))
    }

    /// Builds the lexicon from the training file. A resumed or tested run reads its own, because its weights depend on
    /// the ids.
    fn lexicon(&self, job: &Job, start: Start<'_>) -> anyhow::Result<Lexicon> {
        let TextConfig { text: keys, labels, shared, .. } = &self.config;
        if !matches!(start, Start::New) {
            return Ok(Lexicon::read_by_all(&job.group, || Lexicon::read(&shared.run.out_dir))?);
        }
        let make = || Ok(Lexicon::of(&Texts::read(&keys.train, keys, labels)?, keys));
        Ok(Lexicon::shared(&job.group, make)?)
    }

    fn read_all(&self, lexicon: Lexicon, start: Start<'_>) -> anyhow::Result<Met> {
        let keys = &self.config.text;
        let evaluated = |path: &PathBuf| self.read(path, &lexicon, Purpose::Test);
        if self.purpose == Purpose::Test {
            let data = evaluated(keys.test.as_ref().context("TEXT.TEST was checked")?)?;
            return Ok(Met { lexicon, data, dev: None });
        }
        let data = self.read(&keys.train, &lexicon, Purpose::Train);
        let data = data.map_err(|error| self.of_run(error, start))?;
        let labels = lexicon.labels.len();
        ensure!(
            labels > 1,
            "{:?} has {labels} label, expected at least two; try another TEXT.LABEL",
            keys.train
        );
        let dev = keys.dev.as_ref().map(evaluated).transpose()?;
        Ok(Met { lexicon, data, dev })
    }

    /// Explains an error in a training file. A resumed run has the labels of the file that it started with.
    fn of_run(&self, error: TextError, start: Start<'_>) -> anyhow::Error {
        match (error, start) {
            (TextError::UnknownLabel { path, line, label, .. }, Start::Resumed(_)) => anyhow!(
                "line {line} of {path:?} has the label `{label}`, which the run in {} did not begin with; try the first file, \
                 another OUT_DIR, or TRAIN.AUTO_RESUME False for a new run there",
                self.config.shared.run.out_dir.display()
            ),
            (error, _) => error.into(),
        }
    }
}

/// Returns an error if hosts have different files: their ranks would plan different batches.
pub(crate) fn check_alike<D: Dataset>(job: &Job, data: &D, dev: Option<&D>) -> anyhow::Result<()> {
    let print = |data: &D| format!("{:08x}", data.fingerprint().unwrap_or_default());
    let dev = dev.map_or("none".to_owned(), print);
    let given = [("the text of TEXT.TRAIN", print(data)), ("the text of TEXT.DEV", dev)];
    let given = given.map(|(name, print)| (name.to_owned(), print)).to_vec();
    Ok(ensure_alike(&job.group, "data set", given)?)
}

/// Returns an error if the initial weights or the texts that are needed do not exist.
pub(crate) fn check_files(keys: &Text, weights: Option<&Path>, purpose: Purpose) -> anyhow::Result<()> {
    if let Some(file) = weights {
        check_weights(file)?;
    }
    let check = |key: &str, path: &Path| {
        let advice = format!("another {key}, or drumline data synth-text --out data/text");
        check_file(key, path, &advice)
    };
    match purpose {
        Purpose::Train => {
            check("TEXT.TRAIN", &keys.train)?;
            keys.dev.as_ref().map_or(Ok(()), |dev| check("TEXT.DEV", dev))
        }
        Purpose::Test => {
            let test = keys.test.as_ref().context("TEXT.TEST is not given, nor TEXT.DEV; try a file")?;
            check("TEXT.TEST", test)
        }
    }
}

/// The batch plan for training.
pub(crate) fn train_plan(train: &Train, bucket: bool, seed: u64) -> BatchPlan {
    let Train { batch_size, shuffle, .. } = *train;
    let (by, buffer) = (BatchBy::Samples(batch_size), BUFFER.saturating_mul(batch_size));
    BatchPlan { by, bucket, buffer, shuffle, seed }
}

/// The batch plan for evaluation: texts of similar length are batched together.
pub(crate) fn dev_plan(test: &Test) -> BatchPlan {
    BatchPlan { buffer: usize::MAX, ..BatchPlan::new(BatchBy::Samples(test.batch_size)) }
}

impl Task for LabelTask {
    type Config = TextConfig;
    type Batch = (Tensor, Tensor);
    type Data = TextData;
    type Model = dyn ModuleT;

    const REPORT_STYLE: ReportStyle = REPORT_STYLE;
    const BATCH_KEYS: &'static [&'static str] =
        &["TRAIN.BATCH_SIZE", "TRAIN.BUCKET", "TRAIN.SHUFFLE", "TEXT.MAX_LEN"];
    const HOST_KEYS: &'static [&'static str] = &["TEXT.TRAIN", "TEXT.DEV", "TEXT.TEST"];
    const MODEL_KEYS: &'static [&'static str] = &[
        "PRECISION",
        "MODEL.NET",
        "MODEL.D_WORD_VEC",
        "MODEL.N_LAYERS",
        "MODEL.D_HIDDEN",
        "MODEL.N_HEAD",
        "MODEL.D_INNER_HID",
        "MODEL.DROPOUT",
    ];
    const WEIGHTS_KEY: &'static str = "MODEL.WEIGHTS";

    fn new(config: TextConfig, purpose: Purpose) -> anyhow::Result<Self> {
        check_files(&config.text, config.model.weights.as_deref(), purpose)?;
        Ok(Self { config, purpose, met: None })
    }

    fn config(&self) -> &TextConfig {
        &self.config
    }

    fn check(&self) -> anyhow::Result<()> {
        match self.purpose {
            Purpose::Train => Ok(()),
            Purpose::Test => Ok(Lexicon::read(&self.config.shared.run.out_dir).map(drop)?),
        }
    }

    fn meet(&mut self, job: &Job, start: Start<'_>) -> anyhow::Result<()> {
        let lexicon = self.lexicon(job, start)?;
        let met = job.agree(self.read_all(lexicon, start))?;
        check_alike(job, &met.data, met.dev.as_ref())?;
        self.met = Some(met);
        Ok(())
    }

    fn evaluates(&self) -> bool {
        self.config.text.dev.is_some()
    }

    fn best_by(&self) -> String {
        let first = || match (&self.met, self.config.labels.task) {
            (Some(met), task) => figures(task, &met.lexicon.labels)[0].0,
            (None, TextTask::Classify) => "acc",
            (None, TextTask::Tag) => "metric", // The first metric of tags depends on the labels.
        };
        self.config.train.metric_key.clone().unwrap_or_else(|| first().to_owned())
    }

    fn disable_dropout(&mut self) -> bool {
        std::mem::take(&mut self.config.model.dropout) > 0.0
    }

    fn model(&self, store: &VarStore, _: ModelPlace<'_>) -> anyhow::Result<Built<dyn ModuleT>> {
        let net = build(&store.root(), &self.config, &self.met()?.lexicon)?;
        if let Some(file) = &self.config.model.weights {
            weights::load(store, file)?;
        }
        Ok(Built::new(net))
    }

    fn train_data(&self, device: Device) -> anyhow::Result<DataSets<TextData>> {
        let Met { data, dev, .. } = self.met()?;
        let all = [Some(data), dev.as_ref()].into_iter().flatten();
        let notes = all
            .filter_map(|data| data.note(EMPTY))
            .chain(self.config.model.checkpoint.note(device))
            .collect();
        Ok(DataSets { train: data.clone(), dev: dev.clone(), notes })
    }

    fn test_data(&self, _: Device) -> anyhow::Result<TestData<TextData>> {
        let data = self.met()?.data.clone();
        let notes = data.note(EMPTY).into_iter().collect();
        Ok(TestData { data, notes })
    }

    fn sampler(&self, data: &TextData, place: Place, seed: u64) -> anyhow::Result<Box<dyn Sampler>> {
        let plan = train_plan(&self.config.shared.train, self.config.train.bucket, seed);
        Ok(Box::new(data.sampler(plan, place)?))
    }

    fn dev_sampler(&self, data: &TextData, place: Place) -> anyhow::Result<Option<Box<dyn Sampler>>> {
        Ok(Some(Box::new(data.sampler(dev_plan(&self.config.shared.test), place)?)))
    }

    fn with_loss<'a>(&self, trainer: Trainer<'a, Self>, _: &Self::Model) -> Trainer<'a, Self> {
        let task = self.config.labels.task;
        let trainer = trainer.loss(loss(task));
        match &self.met {
            Some(met) => {
                let (name, figure) = figure_of_step(task, &met.lexicon.labels);
                trainer.train_metric(name, Percent(figure))
            }
            None => trainer,
        }
    }

    fn with_metrics<'a>(
        &self,
        mut trainer: Trainer<'a, Self>,
        evaluated: Evaluated<'a, Self>,
    ) -> anyhow::Result<Trainer<'a, Self>> {
        for (name, figure) in figures(self.config.labels.task, &self.met()?.lexicon.labels) {
            trainer = trainer.metric(name, Percent(figure));
        }
        Ok(match &self.config.train.metric_key {
            Some(key) if evaluated.purpose == Purpose::Train => trainer.metric_key(key),
            _ => trainer,
        })
    }

    fn optimizer(&self) -> OptimizerOptions {
        OptimizerOptions::new(&self.config.shared.optim, &self.config.method)
    }

    fn with_schedule<'a>(&self, trainer: Trainer<'a, Self>) -> anyhow::Result<Trainer<'a, Self>> {
        Ok(trainer.schedule(warmup(&self.config.shared.optim, &self.config.optim)))
    }

    fn save_beside(&self, is_new: bool) -> Result<(), Cause> {
        let run = &self.config.shared.run;
        if is_new {
            self.met()?.lexicon.write(&run.out_dir)?;
        }
        Ok(run.save(&self.config.to_yaml()).map(drop)?)
    }

    fn first_weights(&self) -> Option<&Path> {
        self.config.model.weights.as_deref()
    }
}
