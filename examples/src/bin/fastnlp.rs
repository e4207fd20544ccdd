//! fastNLP's distributed training script, line for line: each line of Python is above its Rust counterpart.
//!
//! ```text
//!   python -m torch.distributed.launch --nproc_per_node=2 train_script.py --args
//!   drumline run --nproc-per-node 2 target/release/fastnlp --epochs 5
//! ```
#![forbid(unsafe_code)]

// import torch.distributed as dist
// from fastNLP import DistTrainer, get_local_rank
// import fastNLP as fnlp
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use drumline::data::Cause;
use drumline::metrics::TopK;
use drumline::optim::{AdamOptions, AdamW, parameters};
use drumline::schedule::Warmup;
use drumline::tch::{self, nn::ModuleT, nn::VarStore};
use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel};
use drumline::{LogOptions, ProcessGroup, is_master, local_device, main_first};
use drumline_examples::FitLog;
use drumline_text::synth_text::{self, SynthTextOptions};
use drumline_text::{Labels, Vocabulary};
use drumline_zoo::models::text::{TextClassifier, TextNet, TextOptions};
use drumline_zoo::text::config::{Text, TextLabels};
use drumline_zoo::text::{Lexicon, TextData, TextTask, Texts};

/// Train a classifier of texts by DistTrainer, in the processes that a launcher has started
#[derive(Parser)]
struct Options {
    /// Folder with train.csv and dev.csv, with columns text and label; by default synthetic texts are made
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Folder of checkpoints, of the log and of the data that rank 0 prepares
    #[arg(long, default_value = "save", value_name = "DIR")]
    save: PathBuf,
    /// Seed of the weights
    #[arg(long, default_value_t = 1, value_name = "S")]
    seed: i64,
    /// Learning rate
    #[arg(long, default_value_t = 5e-3, value_name = "LR")]
    lr: f64,
    /// Fraction of all steps in which the learning rate grows
    #[arg(long, default_value_t = 0.1, value_name = "PART")]
    warmup: f64,
    /// Texts in a batch of each rank
    #[arg(long, default_value_t = 16, value_name = "N")]
    batch_size: usize,
    /// Batches of a step on each rank
    #[arg(long, default_value_t = 2, value_name = "N")]
    update: usize,
    /// Number of epochs
    #[arg(long, default_value_t = 5, value_name = "N")]
    epochs: u64,
}

fn main() -> ExitCode {
    drumline::exit_code(run(&Options::parse()))
}

// def main(options):
fn run(options: &Options) -> anyhow::Result<()> {
    drumline::init_logging(LogOptions::default())?; // INFO of rank 0 and WARN of all ranks, as DistTrainer's logger

    // set_seed(options.seed)
    tch::manual_seed(options.seed);

    // dist.init_process_group('nccl')
    let group = ProcessGroup::from_env()?;
    let store = VarStore::new(local_device(&group));

    // if get_local_rank() != 0:
    //     dist.barrier()
    // data = get_processed_data()
    // if get_local_rank() == 0:
    //     dist.barrier()
    let role = if is_master(&group) { Role::Prepares } else { Role::Reads };
    let data = main_first(&group, "preparing the data", || get_processed_data(options, role))?;
    // model = get_model(data.get_vocab("words"), data.get_vocab("target"))
    let model = get_model(&store, data.words(), data.target())?;

    // def get_trainer(model, data):
    //     trainer = DistTrainer(
    //         train_data=data.get_dataset("train"), model=model,
    let trainer = DistTrainer::new(&group, &*model, &store, data.dataset("train")?)
        // save_path='save',
        .save_path(&options.save)
        // dev_data=data.get_dataset("dev"),
        .dev_data(data.dataset("dev")?)
        // loss=fnlp.CrossEntropyLoss(),
        .loss(CrossEntropy::default())
        // metrics=fnlp.AccuracyMetric(),
        .metric("acc", TopK::new(1))
        // metric_key="acc",
        .metric_key("acc")
        // optimizer=fnlp.AdamW(model.parameters(), lr=options.lr),
        .optimizer(AdamW::new(parameters(&store), AdamOptions { lr: options.lr, ..Default::default() })?)
        // callbacks_master = [fnlp.FitlogCallback()]
        .master_callback(FitLog::in_folder(&options.save))
        // callbacks_all = [fnlp.WarmupCallback(warmup=options.warmup)]
        .schedule(Warmup::fraction(options.warmup))
        // batch_size_per_gpu=options.batch_size,
        .batch_size_per_gpu(options.batch_size)
        // update_every=options.update,
        .update_every(options.update)
        // n_epochs=options.epochs,
        .n_epochs(options.epochs)
        // use_tqdm=True,
        .use_tqdm(true);

    // trainer = get_trainer(model, data)
    // trainer.train()
    let outcome = trainer.train(LoadBestModel::Yes)?;
    if is_master(&group) {
        let (best, step) = (outcome.best_metric.unwrap_or(f64::NAN), outcome.best_step.unwrap_or(0));
        println!("best acc: {best:.4} after step {step} of {}", outcome.steps);
    }
    Ok(())
}

/// What a rank does in `get_processed_data`.
#[derive(Clone, Copy)]
enum Role {
    /// Makes the data and writes it to disk for the others.
    Prepares,
    /// Reads what rank 0 has written.
    Reads,
}

/// The counterpart of fastNLP's `DataBundle`.
struct Processed {
    folder: PathBuf,
    lexicon: Lexicon,
}

/// Rank 0 makes the texts and counts the words, and writes both to disk; the others read them.
fn get_processed_data(options: &Options, role: Role) -> Result<Processed, Cause> {
    let folder = options.data.clone().unwrap_or_else(|| options.save.join("data"));
    if let Role::Reads = role {
        return Ok(Processed { folder, lexicon: Lexicon::read(&options.save)? });
    }
    if options.data.is_none() {
        synth_text::write(&folder, &SynthTextOptions::default())?;
    }
    let texts = Texts::read(&folder.join("train.csv"), &Text::default(), &TextLabels::default())?;
    let lexicon = Lexicon::of(&texts, &Text::default());
    lexicon.write(&options.save)?;
    Ok(Processed { folder, lexicon })
}

impl Processed {
    /// `get_vocab("words")`
    fn words(&self) -> &Vocabulary {
        &self.lexicon.words
    }

    /// `get_vocab("target")`
    fn target(&self) -> &Labels {
        &self.lexicon.labels
    }

    /// `get_dataset(name)`
    fn dataset(&self, name: &str) -> anyhow::Result<TextData> {
        let path = self.folder.join(Path::new(name).with_extension("csv"));
        let texts = Texts::read(&path, &Text::default(), &TextLabels::default())?;
        Ok(TextData::new(&texts, &self.lexicon, TextTask::Classify, None)?)
    }
}

fn get_model(store: &VarStore, words: &Vocabulary, target: &Labels) -> anyhow::Result<Box<dyn ModuleT>> {
    let options = TextOptions {
        net: TextNet::BiLstm { n_layers: 1, d_hidden: 64 },
        vocab: words.len() as i64,
        d_word_vec: 64,
        num_classes: target.len() as i64,
        ..TextOptions::default()
    };
    Ok(Box::new(TextClassifier::new(&store.root(), &options)?))
}
