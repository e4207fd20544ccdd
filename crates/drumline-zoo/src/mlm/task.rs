//! Masked language modelling as a task of the driver.

use std::path::Path;

use anyhow::{Context, ensure};
use drumline::data::{Cause, Dataset, Sampler};
use tch::Device;
use tch::nn::VarStore;

use super::config::MlmConfig;
use super::data::{MaskedData, Masks};
use super::masking::Masking;
use super::weights;
use crate::driver::Job;
use crate::models::bert::{self, Bert, MaskedBatch};
use crate::models::{Classes, Net, StagedNet, logits_of};
use crate::optimizer::{OptimizerOptions, warmup};
use crate::task::{
    Built, DataSets, Evaluated, ModelPlace, Place, Purpose, ReportStyle, Start, Task, TestData, Trainer,
};
use crate::text::{self, Lexicon, TextData, TextTask, Texts, check_alike, check_files, dev_plan, train_plan};
use crate::words::{OfWords, WordLoss};

/// A BERT that learns to predict masked words.
pub(crate) struct MlmTask {
    config: MlmConfig,
    purpose: Purpose,
    met: Option<Met>,
}

/// What is set up with the other ranks.
struct Met {
    /// The vocabulary; there are no labels.
    lexicon: Lexicon,
    /// The training or test data.
    data: MaskedData,
    dev: Option<MaskedData>,
}

impl MlmTask {
    fn met(&self) -> anyhow::Result<&Met> {
        self.met.as_ref().context("the task is not set up: `meet` was not called")
    }

    fn masking(&self, lexicon: &Lexicon) -> Masking {
        Masking { probability: self.config.mlm.probability, mask: lexicon.words.len() as i64 }
    }

    /// Reads a file with the run's vocabulary.
    fn read(&self, path: &Path, lexicon: &Lexicon, masks: Masks) -> anyhow::Result<MaskedData> {
        let MlmConfig { text: keys, model, .. } = &self.config;
        let places = model.max_position_embeddings - MaskedData::ADDED;
        let max_len = keys.max_len.map_or(places, |most| most.min(places));
        let texts = Texts::unlabelled(path, keys)?;
        let texts = TextData::new(&texts, lexicon, TextTask::Classify, Some(max_len))?;
        let data = MaskedData::new(texts, self.masking(lexicon), masks);
        ensure!(
            !data.is_empty(),
            "{path:?} has no text with a word of the vocabulary; try other data, or a smaller TEXT.MIN_COUNT"
        );
        Ok(data)
    }

    fn read_all(&self, lexicon: Lexicon) -> anyhow::Result<Met> {
        let keys = &self.config.text;
        if self.purpose == Purpose::Test {
            let test = keys.test.as_ref().context("TEXT.TEST was checked")?;
            let data = self.read(test, &lexicon, Masks::Fixed)?;
            return Ok(Met { lexicon, data, dev: None });
        }
        let data = self.read(&keys.train, &lexicon, Masks::OfEpoch)?;
        let dev = keys.dev.as_ref().map(|dev| self.read(dev, &lexicon, Masks::Fixed)).transpose()?;
        Ok(Met { lexicon, data, dev })
    }
}

fn notes<'a>(data: impl IntoIterator<Item = &'a MaskedData>) -> Vec<String> {
    data.into_iter().filter_map(|data| data.texts().note("empty or unknown")).collect()
}

impl Task for MlmTask {
    type Config = MlmConfig;
    type Batch = MaskedBatch;
    type Data = MaskedData;
    type Model = Net<Bert, MaskedBatch>;

    const REPORT_STYLE: ReportStyle = text::REPORT_STYLE;
    const BATCH_KEYS: &'static [&'static str] =
        &["TRAIN.BATCH_SIZE", "TRAIN.SHUFFLE", "TEXT.MAX_LEN", "MODEL.MAX_POSITION_EMBEDDINGS"];
    const HOST_KEYS: &'static [&'static str] = &["TEXT.TRAIN", "TEXT.DEV", "TEXT.TEST"];
    const MODEL_KEYS: &'static [&'static str] = &["PRECISION", "MODEL."];
    const WEIGHTS_KEY: &'static str = "MODEL.WEIGHTS";

    fn new(config: MlmConfig, purpose: Purpose) -> anyhow::Result<Self> {
        check_files(&config.text, config.first.weights.as_deref(), purpose)?;
        Ok(Self { config, purpose, met: None })
    }

    fn config(&self) -> &MlmConfig {
        &self.config
    }

    fn meet(&mut self, job: &Job, start: Start<'_>) -> anyhow::Result<()> {
        let MlmConfig { text: keys, shared, .. } = &self.config;
        let make = || Ok(Lexicon::of(&Texts::unlabelled(&keys.train, keys)?, keys));
        let lexicon = match start {
            Start::New => Lexicon::shared(&job.group, make)?,
            _ => Lexicon::read_by_all(&job.group, || Lexicon::read_words(&shared.run.out_dir))?,
        };
        let met = job.agree(self.read_all(lexicon))?;
        check_alike(job, &met.data, met.dev.as_ref())?;
        self.met = Some(met);
        Ok(())
    }

    fn evaluates(&self) -> bool {
        self.config.text.dev.is_some()
    }

    fn best_by(&self) -> String {
        "ppl".to_owned()
    }

    fn disable_dropout(&mut self) -> bool {
        std::mem::take(&mut self.config.model.dropout) > 0.0
    }

    fn model(&self, store: &VarStore, place: ModelPlace<'_>) -> anyhow::Result<Built<Self::Model>> {
        let num_tokens = self.masking(&self.met()?.lexicon).mask + 1;
        let options = &self.config.model;
        let model = match place.stages(store, || bert::layers(place.ranks, options, num_tokens))? {
            Some(stages) => {
                let output = logits_of(Classes { count: num_tokens, tp: place.ranks.tp.clone() });
                Net::Stages(StagedNet { stages, inputs: MaskedBatch::inputs, output })
            }
            None => Net::Whole(Bert::on(place.ranks, &store.root(), options, num_tokens)?),
        };
        if let Some(file) = self.first_weights() {
            weights::load_parts(store, &model.holding(place.ranks), file)?;
        }
        Ok(Built::new(Box::new(model)))
    }

    fn train_data(&self, device: Device) -> anyhow::Result<DataSets<MaskedData>> {
        let Met { data, dev, .. } = self.met()?;
        let mut notes = notes([data].into_iter().chain(dev));
        notes.extend(self.config.model.checkpoint.note(device));
        Ok(DataSets { train: data.clone(), dev: dev.clone(), notes })
    }

    fn test_data(&self, _: Device) -> anyhow::Result<TestData<MaskedData>> {
        let data = &self.met()?.data;
        Ok(TestData { data: data.clone(), notes: notes([data]) })
    }

    /// Batches texts of similar length together.
    fn sampler(&self, data: &MaskedData, place: Place, seed: u64) -> anyhow::Result<Box<dyn Sampler>> {
        let plan = train_plan(&self.config.shared.train, true, seed);
        Ok(Box::new(data.texts().sampler(plan, place)?))
    }

    fn dev_sampler(&self, data: &MaskedData, place: Place) -> anyhow::Result<Option<Box<dyn Sampler>>> {
        Ok(Some(Box::new(data.texts().sampler(dev_plan(&self.config.shared.test), place)?)))
    }

    fn with_loss<'a>(&self, trainer: Trainer<'a, Self>, _: &Self::Model) -> Trainer<'a, Self> {
        trainer.loss(WordLoss::default()).train_metric("acc", OfWords::accuracy())
    }

    fn with_metrics<'a>(
        &self,
        trainer: Trainer<'a, Self>,
        _: Evaluated<'a, Self>,
    ) -> anyhow::Result<Trainer<'a, Self>> {
        let trainer = trainer.metric("ppl", OfWords::perplexity());
        // A lower perplexity is better.
        Ok(trainer.metric("acc", OfWords::accuracy()).metric_key("-ppl"))
    }

    fn optimizer(&self) -> OptimizerOptions {
        OptimizerOptions::new(&self.config.shared.optim, &self.config.method).without_decay_on_norms()
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
        self.config.first.weights.as_deref()
    }
}
