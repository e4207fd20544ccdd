//! Image classification as a task of the driver.

use std::path::Path;

use anyhow::bail;
use drumline::checkpoint::{Loaded, RngState};
use drumline::data::{Cause, Dataset, DistributedSampler, ImageBatch, Prediction, Sampler, SamplerOptions};
use drumline::engine::SyncGroup;
use drumline::schedule::{At, Schedule};
use drumline::trainer::{CrossEntropy, TrainState};
use drumline_torch::{
    Determinism, channels_last, parameters, use_deterministic_algorithms, weights_channels_last,
};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::config::ImageConfig;
use super::data_set::{Found, find};
use super::placing::Placing;
use super::schedule::{schedule, sgd_options};
use super::sets::{test_images, train_images};
use crate::data::{Images, Split};
use crate::driver::check_weights;
use crate::models::{self, Model, ModelOptions, Net, Norm, StagedNet, build, only};
use crate::optimizer::OptimizerOptions;
use crate::percent::Percent;
use crate::task::{
    Built, DataSets, Evaluated, ModelPlace, Place, Purpose, ReportStyle, Task, TestData, Trainer,
};
use crate::weights;

pub(crate) const REPORT_STYLE: ReportStyle = ReportStyle {
    samples: "images",
    rate: "img/s",
    counted: TrainState::samples,
    has_accuracy: true,
    lr_digits: 4,
    metric: |name| Some(format!("Acc@{}", name.strip_prefix("acc")?)),
    nan_advice: "a smaller OPTIM.BASE_LR or more OPTIM.WARMUP_EPOCHS",
    finished_advice: "a larger OPTIM.MAX_EPOCH or TRAIN.MAX_STEPS",
};

/// A network that classifies images.
pub(crate) struct ImageTask {
    config: ImageConfig,
    /// The training dataset; `None` in a test.
    train: Option<Found>,
    test: Found,
}

/// The last layer of the networks that are cut into stages.
const CLASSIFIER: [&str; 2] = ["fc.weight", "fc.bias"];

fn images(batch: &ImageBatch) -> Vec<Tensor> {
    vec![batch.images.shallow_clone()]
}

fn images_channels_last(batch: &ImageBatch) -> Vec<Tensor> {
    // A batch of images can be converted; one that cannot is refused by the first layer.
    vec![channels_last(&batch.images).unwrap_or_else(|_| batch.images.shallow_clone())]
}

impl Task for ImageTask {
    type Config = ImageConfig;
    type Batch = ImageBatch;
    type Data = Images;
    type Model = Net<Model, ImageBatch>;

    const REPORT_STYLE: ReportStyle = REPORT_STYLE;
    const BATCH_KEYS: &'static [&'static str] = &["TRAIN.SHUFFLE"];
    const HOST_KEYS: &'static [&'static str] = &["TRAIN.DATASET", "TEST.DATASET", "TEST.PREDICTIONS"];
    const MODEL_KEYS: &'static [&'static str] =
        &["PRECISION", "MODEL.ARCH", "MODEL.NUM_CLASSES", "MODEL.SYNCBN"];
    const WEIGHTS_KEY: &'static str = "MODEL.WEIGHTS";
    const COLUMNS: &'static [&'static str] = &["label", "predicted", "probability"];

    fn new(config: ImageConfig, purpose: Purpose) -> anyhow::Result<Self> {
        let train = match purpose {
            Purpose::Train => Some(find(&config, Split::Train)?),
            Purpose::Test => None,
        };
        models::check_name(&config.model.arch)?;
        let test = find(&config, Split::Test)?;
        if let Some(file) = &config.model.weights {
            check_weights(file)?;
        }
        Ok(Self { config, train, test })
    }

    fn config(&self) -> &ImageConfig {
        &self.config
    }

    fn evaluates(&self) -> bool {
        true
    }

    fn best_by(&self) -> String {
        "Acc@1".to_owned()
    }

    fn unsynced_norms(&self) -> Option<&'static str> {
        (!self.config.model.syncbn).then_some("MODEL.SYNCBN True")
    }

    fn model(&self, store: &VarStore, place: ModelPlace<'_>) -> anyhow::Result<Built<Self::Model>> {
        let ImageConfig { model: keys, cudnn, .. } = &self.config;
        if cudnn.deterministic {
            use_deterministic_algorithms(Determinism::Require)?;
        }
        tch::Cuda::cudnn_set_benchmark(cudnn.benchmark);
        let sync_group = keys.syncbn.then(|| SyncGroup::new(place.group)).transpose()?;
        let norm = sync_group.clone().map_or(Norm::Batch, Norm::Sync);
        let options =
            ModelOptions { num_classes: keys.num_classes as i64, norm, checkpoint: keys.checkpoint };
        let is_channels_last = keys.memory_format.is_channels_last(place.device);
        let model = match place.stages(store, || models::layers(&keys.arch, &options))? {
            Some(stages) => {
                if let Some(file) = &keys.weights {
                    let mut skipped = stages.elsewhere().clone();
                    skipped.extend(CLASSIFIER.map(str::to_owned).into_iter().filter(|_| keys.new_classifier));
                    weights::load_except(store, file, &skipped)?;
                }
                let inputs = if is_channels_last { images_channels_last } else { images };
                Net::Stages(StagedNet { stages, inputs, output: Box::new(only) })
            }
            None => {
                let model = build(&keys.arch, &store.root(), &options)?;
                if let Some(file) = &keys.weights {
                    let load = if keys.new_classifier { weights::load_backbone } else { weights::load };
                    load(store, file)?;
                }
                Net::Whole(if is_channels_last { model.channels_last(store)? } else { model })
            }
        };
        if is_channels_last && model.stages().is_some() {
            weights_channels_last(&parameters(store))?;
        }
        Ok(Built { model: Box::new(model), sync_group })
    }

    fn train_data(&self, device: Device) -> anyhow::Result<DataSets<Images>> {
        let Some(train) = &self.train else { bail!("a test has no training images") };
        let (train, test) = (train_images(train, &self.config)?, test_images(&self.test, &self.config)?);
        let placing = Placing::of(&self.config, device, &[&train, &test])?;
        let (train, dev) = (placing.put(train)?, Some(placing.put(test)?));
        let notes = placing.note.into_iter().chain(self.config.model.checkpoint.note(device)).collect();
        Ok(DataSets { train, dev, notes })
    }

    fn test_data(&self, device: Device) -> anyhow::Result<TestData<Images>> {
        let test = test_images(&self.test, &self.config)?;
        let placing = Placing::of(&self.config, device, &[&test])?;
        Ok(TestData { data: placing.put(test)?, notes: placing.note.into_iter().collect() })
    }

    fn sampler(&self, data: &Images, place: Place, seed: u64) -> anyhow::Result<Box<dyn Sampler>> {
        let Place { rank, num_replicas } = place;
        let (num_samples, shuffle) = (data.len(), self.config.shared.train.shuffle);
        let options = SamplerOptions { num_samples, num_replicas, rank, shuffle, seed, drop_last: false };
        Ok(Box::new(DistributedSampler::new(options)?))
    }

    fn with_loss<'a>(&self, trainer: Trainer<'a, Self>, _: &Self::Model) -> Trainer<'a, Self> {
        trainer.loss(CrossEntropy::default()).train_metric("acc1", Percent::of_top(1))
    }

    fn with_metrics<'a>(
        &self,
        trainer: Trainer<'a, Self>,
        _: Evaluated<'a, Self>,
    ) -> anyhow::Result<Trainer<'a, Self>> {
        let trainer = trainer.metric("acc1", Percent::of_top(1));
        let k = self.config.train.topk.min(self.config.model.num_classes);
        Ok(if k > 1 { trainer.metric(format!("acc{k}"), Percent::of_top(k)) } else { trainer })
    }

    fn optimizer(&self) -> OptimizerOptions {
        let options = OptimizerOptions::new(&self.config.shared.optim, &self.config.method);
        OptimizerOptions { sgd: sgd_options(&self.config), ..options }
    }

    fn with_schedule<'a>(&self, trainer: Trainer<'a, Self>) -> anyhow::Result<Trainer<'a, Self>> {
        let schedule = schedule(&self.config)?;
        // Distribuuuu sets the learning rate once per epoch.
        let schedule = move |at: At| schedule.lr(At { epoch: at.epoch.floor(), ..at });
        Ok(trainer.schedule(schedule))
    }

    /// Without `TRAIN.LOAD_OPT`, the optimizer and the random numbers start as in a new run.
    fn resumed(&self, mut found: Loaded, store: &VarStore) -> anyhow::Result<Loaded> {
        if !self.config.train.load_opt {
            found.set_optimizer(self.optimizer().first_state(store)?);
            found.state.rng = RngState::capture()?;
        }
        Ok(found)
    }

    fn save_beside(&self, _: bool) -> Result<(), Cause> {
        Ok(self.config.shared.run.save(&self.config.to_yaml()).map(drop)?)
    }

    fn first_weights(&self) -> Option<&Path> {
        self.config.model.weights.as_deref()
    }

    fn check_first_weights(&self) -> anyhow::Result<()> {
        match self.first_weights().filter(|_| self.config.model.new_classifier) {
            Some(file) => bail!(
                "MODEL.NEW_CLASSIFIER is True: {} would be tested with an untrained last layer; \
                 try it without, or the run's OUT_DIR",
                file.display()
            ),
            None => Ok(()),
        }
    }

    fn predictions(&self) -> Option<&Path> {
        self.config.test.predictions.as_deref()
    }

    fn rows(&self, batch: &ImageBatch, output: &Tensor) -> Result<Vec<Prediction>, Cause> {
        let (probability, predicted) = output.softmax(1, Kind::Double).max_dim(1, false);
        let labels: Vec<i64> = (&batch.labels).try_into()?;
        let predicted: Vec<i64> = predicted.try_into()?;
        let probability: Vec<f64> = probability.try_into()?;
        let cells = labels.into_iter().zip(predicted).zip(probability);
        let cells = cells.map(|((label, predicted), probability)| {
            vec![label.into(), predicted.into(), probability.into()]
        });
        let rows = batch.indices.iter().zip(cells);
        Ok(rows.map(|(index, cells)| Prediction { index: *index, cells }).collect())
    }
}
