//! What the training examples share: their arguments, synthetic images as default data, and a log.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use drumline::tch::Kind;
use drumline::tch::nn::VarStore;
use drumline::trainer::{CallbackResult, Evaluation, MasterCallback, TrainState};
use drumline_zoo::synth_cifar;

/// The size of the synthetic data: enough for a loss that falls, in a second or two.
const TRAIN_IMAGES: usize = 2000;
const TEST_IMAGES: usize = 500;

/// The arguments of every training example.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Folder of the data set, with CIFAR-10's binary files; by default synthetic images are made
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
    /// Number of epochs
    #[arg(long, default_value_t = 5, value_name = "N")]
    pub epochs: u64,
    /// Maximum number of steps in an epoch, for a first look
    #[arg(long, default_value_t = usize::MAX, hide_default_value = true, value_name = "N")]
    pub steps: usize,
    /// Images in a step of each process
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub batch_size: usize,
    /// Network: convnet, mlp, resnet18, resnet50, …
    #[arg(long, default_value = "convnet", value_name = "NAME")]
    pub arch: String,
}

impl Args {
    /// The folder of the data set. Synthetic images are made once for all examples and ranks: the first process gives
    /// the folder its name, and all would have made the same.
    pub fn data(&self) -> anyhow::Result<PathBuf> {
        if let Some(data) = &self.data {
            return Ok(data.clone());
        }
        let data = std::env::temp_dir().join(format!("drumline-examples-cifar-{TRAIN_IMAGES}"));
        if data.is_dir() {
            return Ok(data);
        }
        let making = data.with_extension(std::process::id().to_string());
        synth_cifar::write(&making, TRAIN_IMAGES, TEST_IMAGES, 1)?;
        if fs::rename(&making, &data).is_err() {
            fs::remove_dir_all(&making)?; // another process was faster
        }
        anyhow::ensure!(data.is_dir(), "cannot make {}; try --data", data.display());
        Ok(data)
    }

    /// The number of steps of an epoch with this many batches.
    pub fn steps_of(&self, num_batches: usize) -> usize {
        self.steps.min(num_batches)
    }
}

/// On rank 0: writes a line to `fitlog.txt` for each evaluation.
#[derive(Debug)]
pub struct FitLog {
    path: PathBuf,
    file: Option<File>,
}

impl FitLog {
    /// Writes in this folder, which is created if necessary.
    pub fn in_folder(folder: impl AsRef<Path>) -> Self {
        Self { path: folder.as_ref().join("fitlog.txt"), file: None }
    }
}

impl MasterCallback for FitLog {
    fn on_train_begin(&mut self, _: &TrainState) -> CallbackResult {
        fs::create_dir_all(self.path.with_file_name(""))?;
        self.file = Some(File::create(&self.path)?);
        Ok(())
    }

    fn on_valid_end(&mut self, state: &TrainState, evaluation: &Evaluation) -> CallbackResult {
        if let Some(file) = &mut self.file {
            writeln!(file, "step {} loss {:.5} {:?}", state.step(), state.loss(), evaluation.metrics)?;
        }
        Ok(())
    }
}

/// The norm of all weights, to check whether two trainings have the same result.
pub fn norm_of(store: &VarStore) -> f64 {
    let squares =
        store.trainable_variables().iter().map(|w| w.square().sum(Kind::Double).double_value(&[])).sum();
    f64::sqrt(squares)
}
