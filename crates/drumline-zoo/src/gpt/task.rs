//! A GPT as a task of the driver.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};
use drumline::data::{Cause, Dataset, DistributedSampler, Sampler, SamplerOptions};
use drumline::engine::context::ContextParallel;
use drumline_text::GptTokenizer;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::config::GptConfig;
use super::data::{Begin, TokenData};
use super::figures::{PerToken, Perplexity, TokensPerSecond};
use super::found::{BYTES, check_beside};
use super::weights;
use crate::driver::{Job, Parallelism, check_file, check_weights};
use crate::models::gpt::{self, Gpt, SummedLoss};
use crate::models::{Net, StagedNet, only};
use crate::optimizer::{OptimizerOptions, warmup};
use crate::task::{
    Built, DataSets, Evaluated, ModelPlace, Place, Purpose, ReportStyle, Start, Task, TestData, Trainer,
};

/// The copy of the run's tokenizer in `OUT_DIR`.
pub(super) const TOKENIZER: &str = "tokenizer.json";

const REPORT_STYLE: ReportStyle = ReportStyle {
    samples: "windows",
    rate: "tokens/s",
    counted: |state| state.count() as u64,
    has_accuracy: false,
    lr_digits: 6,
    metric: |name| (name != "loss").then(|| name.to_owned()),
    nan_advice: "a smaller OPTIM.BASE_LR, more OPTIM.WARMUP, or OPTIM.GRAD_CLIP",
    finished_advice: "a larger OPTIM.MAX_EPOCH or TRAIN.MAX_STEPS",
};

/// A GPT language model.
pub(crate) struct GptTask {
    config: GptConfig,
    tokenizer: GptTokenizer,
    /// The training data; `None` in a test.
    train: Option<TokenData>,
    dev: Option<TokenData>,
}

impl GptTask {
    /// Returns an error if there are too few windows for one batch on each rank. All batches have the same shape.
    fn check_enough(&self, ranks: usize) -> anyhow::Result<()> {
        let Some(train) = &self.train else { return Ok(()) };
        let (windows, wanted) = (train.len(), self.config.shared.train.batch_size * ranks);
        ensure!(
            windows >= wanted,
            "GPT.TRAIN has {windows} windows of {} tokens, expected at least {wanted}, a batch for each of {ranks} ranks; try \
             more text, or a smaller TRAIN.BATCH_SIZE",
            self.config.model.block
        );
        Ok(())
    }

    /// Returns an error if the run in `OUT_DIR` has another number of heads or another tokenizer. The number of heads
    /// is not visible in any tensor's shape. A run stores its tokenizer beside the checkpoints, unless its tokens are
    /// bytes.
    fn check_same_model(&self) -> anyhow::Result<()> {
        let (run, tokens) = (&self.config.shared.run, &self.config.tokens);
        let (folder, file) = (&run.out_dir, run.out_dir.join(TOKENIZER));
        if let Ok(last) = GptConfig::load::<&str>(Some(&folder.join(&run.cfg_dest)), &[]) {
            let (heads, now) = (last.model.n_head, self.config.model.n_head);
            ensure!(
                heads == now,
                "the run in {} has MODEL.N_HEAD {heads}, and now it is {now}: with the same weights that is another model; try MODEL.N_HEAD \
                 {heads}, or another OUT_DIR",
                folder.display()
            );
            ensure!(
                last.tokens.tokenizer == Path::new(BYTES) || file.is_file(),
                "the run in {} has lost its {TOKENIZER}, so that its tokens cannot be compared with those of GPT.TOKENIZER {}; try to put it \
                 back (it last ran with {}), or another OUT_DIR",
                folder.display(),
                tokens.tokenizer.display(),
                last.tokens.tokenizer.display()
            );
        }
        let (kept, name) = if file.is_file() {
            (GptTokenizer::open(&file)?, file)
        } else {
            (GptTokenizer::bytes(), BYTES.into())
        };
        ensure!(
            kept.fingerprint() == self.tokenizer.fingerprint(),
            "the run in {} has another tokenizer, of {} tokens, than GPT.TOKENIZER {}, of {}; try GPT.TOKENIZER {}, or another OUT_DIR",
            folder.display(),
            kept.vocabulary(),
            tokens.tokenizer.display(),
            self.tokenizer.vocabulary(),
            name.display()
        );
        Ok(())
    }
}

/// Opens the tokenizer that the configuration names. A run keeps a copy in `OUT_DIR`.
fn tokenizer(config: &GptConfig) -> anyhow::Result<GptTokenizer> {
    let (name, kept) = (&config.tokens.tokenizer, config.shared.run.out_dir.join(TOKENIZER));
    let advice = if kept.is_file() {
        format!("the run's own, {}", kept.display())
    } else {
        "bytes, a tokenizer.json, or a folder with vocab.json and merges.txt, which drumline data bpe makes"
            .into()
    };
    let is_there = name == Path::new(BYTES) || name.exists();
    ensure!(is_there, "GPT.TOKENIZER: there is no {}; try {advice}", name.display());
    Ok(GptTokenizer::open(name)?)
}

/// Opens a token file that the configuration names.
fn windows(key: &str, path: &Path, tokenizer: &GptTokenizer, block: usize) -> anyhow::Result<TokenData> {
    let is_example = path.starts_with("data/story") || path.starts_with("./data/story");
    let example = "; drumline data synth-story --out data/story makes the example's text";
    let example = if is_example { example } else { "" };
    ensure!(!path.is_dir(), "{key}: {} is a folder; try a file of tokens in it", path.display());
    check_file(key, path, &format!("drumline data tokens TEXT --out {}{example}", path.display()))?;
    Ok(TokenData::open(path, tokenizer, block)?)
}

/// The ranks that have parts of a model's texts.
fn cp_of(model: &Net<Gpt, (Tensor, Tensor)>) -> ContextParallel {
    match model {
        Net::Whole(model) => model.ranks().cp.clone(),
        Net::Stages(staged) => ContextParallel::on(staged.stages.mesh()),
    }
}

impl Task for GptTask {
    type Config = GptConfig;
    type Batch = (Tensor, Tensor);
    type Data = TokenData;
    type Model = Net<Gpt, (Tensor, Tensor)>;

    const REPORT_STYLE: ReportStyle = REPORT_STYLE;
    const BATCH_KEYS: &'static [&'static str] = &["MODEL.BLOCK", "TRAIN.SHUFFLE"];
    const HOST_KEYS: &'static [&'static str] = &["GPT.TRAIN", "GPT.DEV", "GPT.TOKENIZER"];
    const MODEL_KEYS: &'static [&'static str] = &[
        "PRECISION",
        "MODEL.N_LAYER",
        "MODEL.N_HEAD",
        "MODEL.N_EMBD",
        "MODEL.BLOCK",
        "MODEL.VOCAB_MULTIPLE",
        "MODEL.DROPOUT",
    ];
    const WEIGHTS_KEY: &'static str = "MODEL.WEIGHTS";
    const DROP_LAST: bool = true;

    fn new(config: GptConfig, purpose: Purpose) -> anyhow::Result<Self> {
        if let Some(file) = &config.model.weights {
            check_weights(file)?;
            check_beside(file, config.model.n_head)?;
        }
        let tokenizer = tokenizer(&config)?;
        let (tokens, block) = (&config.tokens, config.model.block);
        let train = match purpose {
            Purpose::Train => Some(windows("GPT.TRAIN", &tokens.train, &tokenizer, block)?),
            Purpose::Test => None,
        };
        let dev = tokens.dev.as_ref().map(|dev| windows("GPT.DEV", dev, &tokenizer, block)).transpose()?;
        ensure!(train.is_some() || dev.is_some(), "GPT.DEV is not given; try a file");
        Ok(Self { config, tokenizer, train, dev })
    }

    fn config(&self) -> &GptConfig {
        &self.config
    }

    fn fingerprints(&self) -> anyhow::Result<Vec<(String, String)>> {
        let print =
            |data: &Option<TokenData>| data.as_ref().map_or(Ok(String::new()), TokenData::fingerprint);
        Ok(vec![
            ("the tokens of GPT.TRAIN".to_owned(), print(&self.train)?),
            ("the tokens of GPT.DEV".to_owned(), print(&self.dev)?),
        ])
    }

    fn meet(&mut self, job: &Job, start: Start<'_>) -> anyhow::Result<()> {
        let place = Parallelism::of(&job.group, &self.config.shared)
            .map(|parallelism| parallelism.place(job.group.rank()));
        job.agree(place.and_then(|place| self.check_enough(place.num_replicas)))?;
        // Rank 0 decides, because its folder counts.
        job.on_rank_0(|| match start {
            Start::New | Start::TestOfFile => Ok(()),
            Start::TestOfRun if !self.folders().checkpoints.join("latest").is_dir() => Ok(()),
            Start::Resumed(_) | Start::TestOfRun => self.check_same_model(),
        })
    }

    fn evaluates(&self) -> bool {
        self.dev.is_some()
    }

    fn best_by(&self) -> String {
        "ppl".to_owned()
    }

    fn disable_dropout(&mut self) -> bool {
        std::mem::take(&mut self.config.model.dropout) > 0.0
    }

    fn model(&self, store: &VarStore, place: ModelPlace<'_>) -> anyhow::Result<Built<Self::Model>> {
        let options = self.config.model.options(self.tokenizer.vocabulary());
        let model = match place.stages(store, || gpt::layers(place.ranks, &options))? {
            Some(stages) => Net::Stages(StagedNet {
                stages,
                inputs: |(tokens, targets): &(Tensor, Tensor)| {
                    vec![tokens.shallow_clone(), targets.shallow_clone()]
                },
                output: Box::new(|outputs| Ok(SummedLoss(only(outputs)?))),
            }),
            None => Net::Whole(Gpt::on(place.ranks, &store.root(), &options)?),
        };
        if let Some(file) = &self.config.model.weights {
            weights::load_parts(store, &options, &model.holding(place.ranks), file)?;
        }
        Ok(Built::new(Box::new(model)))
    }

    fn train_data(&self, device: Device) -> anyhow::Result<DataSets<TokenData>> {
        let begin = if self.config.shared.train.shuffle { Begin::Moved } else { Begin::Fixed };
        let train = self.train.clone().context("a test has no training tokens")?.beginning(begin);
        let notes = self.config.model.checkpoint.note(device).into_iter().collect();
        Ok(DataSets { train, dev: self.dev.clone(), notes })
    }

    fn test_data(&self, _: Device) -> anyhow::Result<TestData<TokenData>> {
        let data = self.dev.clone().context("GPT.DEV was checked")?;
        Ok(TestData { data, notes: Vec::new() })
    }

    fn sampler(&self, data: &TokenData, place: Place, seed: u64) -> anyhow::Result<Box<dyn Sampler>> {
        let Place { rank, num_replicas } = place;
        let (num_samples, shuffle) = (data.len(), self.config.shared.train.shuffle);
        let options = SamplerOptions { num_samples, num_replicas, rank, shuffle, seed, drop_last: true };
        Ok(Box::new(DistributedSampler::new(options)?))
    }

    fn with_loss<'a>(&self, trainer: Trainer<'a, Self>, model: &Self::Model) -> Trainer<'a, Self> {
        let cp = cp_of(model);
        trainer.loss(PerToken::on(&cp)).train_metric("tokens_per_s", TokensPerSecond::on(&cp))
    }

    fn with_metrics<'a>(
        &self,
        trainer: Trainer<'a, Self>,
        evaluated: Evaluated<'a, Self>,
    ) -> anyhow::Result<Trainer<'a, Self>> {
        // A lower perplexity is better.
        let perplexity = Perplexity::on(&cp_of(evaluated.model));
        Ok(trainer.metric("ppl", perplexity).metric_key("-ppl"))
    }

    fn optimizer(&self) -> OptimizerOptions {
        OptimizerOptions::new(&self.config.shared.optim, &self.config.method).without_decay_on_norms()
    }

    fn with_schedule<'a>(&self, trainer: Trainer<'a, Self>) -> anyhow::Result<Trainer<'a, Self>> {
        Ok(trainer.schedule(warmup(&self.config.shared.optim, &self.config.optim)))
    }

    /// Copies the tokenizer into `OUT_DIR`, so that `drumline generate` needs no other folder. Bytes have no tokenizer
    /// file.
    fn save_beside(&self, is_new: bool) -> Result<(), Cause> {
        let run = &self.config.shared.run;
        let of_run_before = run.out_dir.join(TOKENIZER);
        if is_new && self.tokenizer.save(&run.out_dir)?.is_none() && of_run_before.is_file() {
            fs::remove_file(of_run_before)?;
        }
        Ok(run.save(&self.config.to_yaml()).map(drop)?)
    }

    fn first_weights(&self) -> Option<&Path> {
        self.config.model.weights.as_deref()
    }
}
