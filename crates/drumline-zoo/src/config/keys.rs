//! Every key: its name, type, default and meaning. Distribuuuu's, with its meanings and defaults, and ours.

use std::collections::BTreeSet;
use std::path::PathBuf;

use super::error::ConfigError;
use super::fp16::Fp16;
use super::section::{Section, section};
use super::setting::{DataKind, DeviceKind, LrPolicy, MemoryFormat, PrecisionKind, Switch};
use super::table::Table;

section! {
    /// `MODEL`: the network.
    Model "MODEL" {
        /// Name of the network
        "ARCH" arch: String = "resnet18".into();
        /// Number of classes
        "NUM_CLASSES" num_classes: usize = 1000;
        /// Not available: weights are never fetched; MODEL.WEIGHTS takes a file
        "PRETRAINED" pretrained: bool = false;
        /// Batch norm over all ranks instead of each alone
        "SYNCBN" syncbn: bool = false;
        /// safetensors file with the first weights, by torchvision's names
        "WEIGHTS" weights: Option<PathBuf> = None;
        /// A new last layer instead of that in MODEL.WEIGHTS, for other classes
        "NEW_CLASSIFIER" new_classifier: bool = false;
        /// Random images instead of a data set, to measure speed
        "DUMMY_INPUT" dummy_input: bool = false;
        /// How images and weights of convolutions lie in memory; auto: channels_last on a GPU
        "MEMORY_FORMAT" memory_format: MemoryFormat = MemoryFormat::Auto;
    }
}

section! {
    /// `DATA`: what lies in the folders of `TRAIN` and `TEST`.
    Data "DATA" {
        /// Format of the data set; auto looks at the files
        "KIND" kind: DataKind = DataKind::Auto;
        /// Images kept as bytes where the network is, and made into batches there; auto: on a GPU, if they fit
        "ON_DEVICE" on_device: Switch = Switch::Auto;
    }
}

section! {
    /// `TRAIN`: what is trained on.
    Train "TRAIN" {
        /// Images in a batch of each rank
        "BATCH_SIZE" batch_size: usize = 32;
        /// Side of an image in pixels; those of CIFAR stay as they are
        "IM_SIZE" im_size: usize = 224;
        /// Folder of the data set
        "DATASET" dataset: PathBuf = "./data/ILSVRC/".into();
        /// Folder in it with the training images
        "SPLIT" split: String = "train".into();
        /// Go on from the last checkpoint in OUT_DIR
        "AUTO_RESUME" auto_resume: bool = true;
        /// Resume although the data set is another than at the checkpoint, by its length or fingerprint
        "ACCEPT_NEW_DATA" accept_new_data: bool = false;
        /// Take the optimizer's state from the checkpoint too
        "LOAD_OPT" load_opt: bool = true;
        /// Threads that load images, for each rank
        "WORKERS" workers: usize = 4;
        /// Page-locked batches, for GPUs
        "PIN_MEMORY" pin_memory: bool = true;
        /// Steps from one line of progress to the next
        "PRINT_FREQ" print_freq: usize = 30;
        /// The second accuracy counts an image whose class is among the best k
        "TOPK" topk: usize = 5;
        /// Random crops and flips
        "AUGMENT" augment: bool = true;
        /// A new order in each epoch
        "SHUFFLE" shuffle: bool = true;
        /// Batches whose gradients are added up before each step, on each rank
        "ACCUMULATE" accumulate: usize = 1;
        /// Event files for TensorBoard in OUT_DIR/tensorboard
        "TENSORBOARD" tensorboard: bool = true;
        /// Steps to trace for Perfetto, after the first five, in OUT_DIR/trace
        "TRACE_STEPS" trace_steps: u64 = 0;
        /// Stop after this many steps of the whole run
        "MAX_STEPS" max_steps: Option<u64> = None;
    }
}

section! {
    /// `TEST`: what is evaluated on.
    Test "TEST" {
        /// Folder of the data set; that of TRAIN.DATASET unless given
        "DATASET" dataset: PathBuf = "./data/ILSVRC/".into();
        /// Folder in it with the test images
        "SPLIT" split: String = "val".into();
        /// Images in a batch of each rank
        "BATCH_SIZE" batch_size: usize = 200;
        /// The shorter side is scaled to this many pixels, then the centre of TRAIN.IM_SIZE is cut out
        "IM_SIZE" im_size: usize = 256;
        /// Batches from one line of progress to the next
        "PRINT_FREQ" print_freq: usize = 10;
        /// File for each image's label, prediction and its probability: CSV, or JSON lines if it ends in .jsonl
        "PREDICTIONS" predictions: Option<PathBuf> = None;
    }
}

section! {
    /// `CUDNN`: how GPU kernels are chosen.
    Cudnn "CUDNN" {
        /// Try several kernels and keep the fastest
        "BENCHMARK" benchmark: bool = true;
        /// Only kernels that give the same bits every time
        "DETERMINISTIC" deterministic: bool = false;
    }
}

section! {
    /// `OPTIM`: SGD and its learning rate.
    Optim "OPTIM" {
        /// Number of epochs
        "MAX_EPOCH" max_epoch: u64 = 100;
        /// How the learning rate falls
        "LR_POLICY" lr_policy: LrPolicy = LrPolicy::Cos;
        /// Learning rate
        "BASE_LR" base_lr: f64 = 0.2;
        /// Where cos ends, as a part of BASE_LR
        "MIN_LR" min_lr: f64 = 0.0;
        /// Epochs at which steps multiplies by LR_MULT; the first is 0
        "STEPS" steps: Vec<u64> = Vec::new();
        /// Factor at each of STEPS
        "LR_MULT" lr_mult: f64 = 0.1;
        /// Momentum
        "MOMENTUM" momentum: f64 = 0.9;
        /// Dampening of the momentum
        "DAMPENING" dampening: f64 = 0.0;
        /// Nesterov's momentum
        "NESTEROV" nesterov: bool = true;
        /// Where the warm-up begins, as a part of the learning rate
        "WARMUP_FACTOR" warmup_factor: f64 = 0.1;
        /// Epochs of warm-up
        "WARMUP_EPOCHS" warmup_epochs: u64 = 5;
        /// Weight decay
        "WEIGHT_DECAY" weight_decay: f64 = 5e-5;
    }
}

section! {
    /// Keys without a section.
    Run "" {
        /// Folder for checkpoints, metrics and the resolved configuration
        "OUT_DIR" out_dir: PathBuf = "./exp".into();
        /// Name of the resolved configuration in OUT_DIR
        "CFG_DEST" cfg_dest: String = "config.yaml".into();
        /// Seed of weights, order and augmentation; None: another in each run
        "RNG_SEED" rng_seed: Option<u64> = None;
        /// What computes; auto takes a GPU if there is one
        "DEVICE" device: DeviceKind = DeviceKind::Auto;
        /// Numbers of the training; bf16 and fp16: in matrix products and convolutions
        "PRECISION" precision: PrecisionKind = PrecisionKind::Fp32;
        /// On a GPU, steps recorded as CUDA graphs where that is possible; the losses are the same
        "CUDA_GRAPHS" cuda_graphs: bool = true;
    }
}

/// All keys of a run, by section.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Config {
    /// `MODEL`
    pub model: Model,
    /// `DATA`
    pub data: Data,
    /// `TRAIN`
    pub train: Train,
    /// `TEST`
    pub test: Test,
    /// `OPTIM`
    pub optim: Optim,
    /// `CUDNN`
    pub cudnn: Cudnn,
    /// `FP16`
    pub fp16: Fp16,
    /// `OUT_DIR`, `CFG_DEST`, `RNG_SEED`, `DEVICE`
    pub run: Run,
}

impl Table for Config {
    fn sections(&self) -> Vec<&dyn Section> {
        let Self { model, data, train, test, optim, cudnn, fp16, run } = self;
        vec![model, data, train, test, optim, cudnn, fp16, run]
    }

    fn sections_mut(&mut self) -> Vec<&mut dyn Section> {
        let Self { model, data, train, test, optim, cudnn, fp16, run } = self;
        vec![model, data, train, test, optim, cudnn, fp16, run]
    }

    /// `TEST.DATASET` that nobody gives is the folder of `TRAIN.DATASET`.
    fn settle(&mut self, given: &BTreeSet<String>) {
        if !given.contains("TEST.DATASET") {
            self.test.dataset.clone_from(&self.train.dataset);
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.check_values()
    }
}
