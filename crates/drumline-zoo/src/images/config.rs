//! The configuration of a run on images: Distribuuuu's keys, with its meanings and defaults, and keys of our own.

use std::collections::BTreeSet;
use std::path::PathBuf;

use crate::config::check::{at_least_1, invalid, not_negative};
use crate::config::section::section;
use crate::config::table::{Table, sections, task_table};
use crate::config::{
    ConfigError, Cuts, DataKind, LrPolicy, MemoryFormat, Method, OptimizerName, SharedKeys, Switch, Train,
};
use crate::models::{Checkpointing, num_layers};

section! {
    /// `MODEL`: the network.
    ImageModel "MODEL" {
        /// Name of the network
        "ARCH" arch: String = "resnet18".into();
        /// Number of classes
        "NUM_CLASSES" num_classes: usize = 1000;
        /// Not available: weights are never downloaded; use MODEL.WEIGHTS
        "PRETRAINED" pretrained: bool = false;
        /// Synchronise batch norm over all ranks
        "SYNCBN" syncbn: bool = false;
        /// Activation checkpointing of ResNets: none, full, selective, offload, or N for every Nth block
        "CHECKPOINT" checkpoint: Checkpointing = Checkpointing::None;
        /// safetensors file with initial weights, with torchvision's names
        "WEIGHTS" weights: Option<PathBuf> = None;
        /// Start with a new last layer instead of that in MODEL.WEIGHTS, for other classes
        "NEW_CLASSIFIER" new_classifier: bool = false;
        /// Random images instead of a dataset, to measure speed
        "DUMMY_INPUT" dummy_input: bool = false;
        /// Memory format of images and convolution weights; auto: channels_last on a GPU
        "MEMORY_FORMAT" memory_format: MemoryFormat = MemoryFormat::Auto;
    }
}

section! {
    /// `DATA`: the format of the dataset.
    ImageData "DATA" {
        /// Format of the dataset; auto: detected from the files
        "KIND" kind: DataKind = DataKind::Auto;
        /// Store images as bytes on the network's device, and make batches there; auto: on a GPU, if they fit
        "ON_DEVICE" on_device: Switch = Switch::Auto;
    }
}

section! {
    /// `TRAIN`: the training data.
    ImageTrain "TRAIN" {
        /// Side of the network's input images in pixels; ignored for CIFAR
        "IM_SIZE" im_size: usize = 224;
        /// Folder of the dataset
        "DATASET" dataset: PathBuf = "./data/ILSVRC/".into();
        /// Subfolder with the training images
        "SPLIT" split: String = "train".into();
        /// On resume, also load the optimizer's state
        "LOAD_OPT" load_opt: bool = true;
        /// k of the second, top-k accuracy
        "TOPK" topk: usize = 5;
        /// Random crops and flips
        "AUGMENT" augment: bool = true;
    }
}

section! {
    /// `TEST`: the evaluation data.
    ImageTest "TEST" {
        /// Folder of the dataset; by default that of TRAIN.DATASET
        "DATASET" dataset: PathBuf = "./data/ILSVRC/".into();
        /// Subfolder with the test images
        "SPLIT" split: String = "val".into();
        /// The shorter side is resized to this many pixels, then the centre of TRAIN.IM_SIZE is cropped
        "IM_SIZE" im_size: usize = 256;
        /// File for each image's label, prediction and its probability: CSV, or JSON lines if it ends in .jsonl
        "PREDICTIONS" predictions: Option<PathBuf> = None;
    }
}

section! {
    /// `OPTIM`: momentum of SGD, and a learning rate that changes once per epoch.
    ImageOptim "OPTIM" {
        /// How the learning rate decays
        "LR_POLICY" lr_policy: LrPolicy = LrPolicy::Cos;
        /// With LR_POLICY steps, epochs at which the learning rate is multiplied by LR_MULT; the first is 0
        "STEPS" steps: Vec<u64> = Vec::new();
        /// Factor at each of STEPS
        "LR_MULT" lr_mult: f64 = 0.1;
        /// Dampening of the momentum
        "DAMPENING" dampening: f64 = 0.0;
        /// Nesterov's momentum
        "NESTEROV" nesterov: bool = true;
        /// Initial learning rate of the warm-up, as a fraction
        "WARMUP_FACTOR" warmup_factor: f64 = 0.1;
        /// Number of warm-up epochs
        "WARMUP_EPOCHS" warmup_epochs: u64 = 5;
    }
}

section! {
    /// `CUDNN`: how GPU kernels are chosen.
    Cudnn "CUDNN" {
        /// Benchmark several kernels and use the fastest
        "BENCHMARK" benchmark: bool = true;
        /// Use only deterministic kernels
        "DETERMINISTIC" deterministic: bool = false;
    }
}

/// All keys of a run on images, by section.
///
/// ```
/// use drumline_zoo::images::ImageConfig;
///
/// let config = ImageConfig::load(None, &["OPTIM.BASE_LR", "0.1", "MODEL.ARCH", "resnet50"])?;
/// assert_eq!((config.shared.optim.base_lr, config.model.arch.as_str()), (0.1, "resnet50"));
///
/// let error = ImageConfig::load(None, &["OPTIM.BASELR", "0.1"]).unwrap_err();
/// assert!(error.to_string().contains("OPTIM.BASE_LR"));
/// # Ok::<(), drumline_zoo::config::ConfigError>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct ImageConfig {
    /// `MODEL`
    pub model: ImageModel,
    /// `DATA`
    pub data: ImageData,
    /// `TRAIN`, beside the shared keys
    pub train: ImageTrain,
    /// `TEST`, beside the shared keys
    pub test: ImageTest,
    /// `OPTIM`, beside the shared keys
    pub method: Method,
    /// The learning rate of `OPTIM`
    pub optim: ImageOptim,
    /// `CUDNN`
    pub cudnn: Cudnn,
    /// The sections that every task has
    pub shared: SharedKeys,
}

impl Default for ImageConfig {
    fn default() -> Self {
        let train = Train { workers: 4, ..Train::default() };
        Self {
            model: ImageModel::default(),
            data: ImageData::default(),
            train: ImageTrain::default(),
            test: ImageTest::default(),
            method: Method { method: OptimizerName::Sgd, ..Method::default() },
            optim: ImageOptim::default(),
            cudnn: Cudnn::default(),
            shared: SharedKeys { train, ..SharedKeys::default() },
        }
    }
}

task_table!(ImageConfig, "A network on images: drumline train");

impl Table for ImageConfig {
    sections!(
        model,
        data,
        shared.train,
        train,
        shared.test,
        test,
        shared.optim,
        method,
        optim,
        cudnn,
        shared.fp16,
        shared.parallel,
        shared.run
    );

    /// `TEST.DATASET` defaults to `TRAIN.DATASET`.
    fn settle(&mut self, given: &BTreeSet<String>) {
        self.method.settle(given);
        if !given.contains("TEST.DATASET") {
            self.test.dataset.clone_from(&self.train.dataset);
        }
    }

    fn check(&self) -> Result<(), ConfigError> {
        self.shared.check()?;
        let layers = num_layers(&self.model.arch);
        self.shared.parallel.check_model(Cuts { heads: None, layers })?;
        if self.model.syncbn && self.shared.parallel.pp > 1 {
            let what =
                format!("is True, which PARALLEL.PP {} does not support; try False", self.shared.parallel.pp);
            return invalid("MODEL.SYNCBN", what);
        }
        at_least_1(&[
            ("MODEL.NUM_CLASSES", self.model.num_classes as u64),
            ("TRAIN.IM_SIZE", self.train.im_size as u64),
            ("TRAIN.TOPK", self.train.topk as u64),
            ("TEST.IM_SIZE", self.test.im_size as u64),
        ])?;
        self.method.check(&self.shared)?;
        self.check_optim()?;
        if self.model.pretrained {
            let what = "is True, but no weights are fetched; try MODEL.WEIGHTS FILE.safetensors";
            return invalid("MODEL.PRETRAINED", what);
        }
        if self.model.new_classifier && self.model.weights.is_none() {
            let what = "is True, which is for MODEL.WEIGHTS; try that, or leave it out";
            return invalid("MODEL.NEW_CLASSIFIER", what);
        }
        Ok(())
    }
}

impl ImageConfig {
    fn check_optim(&self) -> Result<(), ConfigError> {
        let optim = &self.optim;
        not_negative(&[("OPTIM.LR_MULT", optim.lr_mult), ("OPTIM.WARMUP_FACTOR", optim.warmup_factor)])?;
        let is_sgd = self.method.method == OptimizerName::Sgd;
        if is_sgd && optim.nesterov && (self.shared.optim.momentum == 0.0 || optim.dampening != 0.0) {
            let what = "is True, which needs a momentum and no dampening; try OPTIM.NESTEROV False";
            return invalid("OPTIM.NESTEROV", what);
        }
        let rises = optim.steps.windows(2).all(|pair| pair[0] < pair[1]);
        if optim.lr_policy == LrPolicy::Steps && (optim.steps.first() != Some(&0) || !rises) {
            let what = "must begin with 0 and rise when OPTIM.LR_POLICY is steps; try [0, 30, 60, 90]";
            return invalid("OPTIM.STEPS", what);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::table::assert_in_guide;

    fn said(pairs: &[&str]) -> String {
        ImageConfig::load(None, pairs).unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_distribuuuus() {
        let config = ImageConfig::default();
        assert_eq!(config.model.arch, "resnet18");
        assert_eq!((config.shared.train.batch_size, config.shared.test.batch_size), (32, 200));
        assert_eq!((config.shared.optim.base_lr, config.shared.optim.weight_decay), (0.2, 5e-5));
        assert_eq!(
            (config.shared.run.out_dir.as_path(), config.shared.run.rng_seed),
            (Path::new("./exp"), None)
        );
        assert_eq!(ImageConfig::load::<&str>(None, &[]).unwrap(), config);
    }

    #[test]
    fn the_command_line_wins_over_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let text = "OPTIM:\n  BASE_LR: 0.1\n  STEPS: [0, 30, 60]\n  LR_POLICY: steps\nTRAIN: {BATCH_SIZE: 8}\nRNG_SEED: 7\n";
        std::fs::write(&path, text).unwrap();
        let pairs =
            ["TRAIN.BATCH_SIZE", "16", "RNG_SEED", "None", "TRAIN.SHUFFLE", "False", "OPTIM.STEPS", "(0, 5)"];
        let config = ImageConfig::load(Some(&path), &pairs).unwrap();
        assert_eq!(
            (config.shared.optim.base_lr, config.shared.train.batch_size, config.shared.run.rng_seed),
            (0.1, 16, None)
        );
        assert_eq!((config.optim.steps.as_slice(), config.shared.train.shuffle), (&[0, 5][..], false));
        assert_eq!(config.optim.lr_policy, LrPolicy::Steps);
    }

    #[test]
    fn a_saved_configuration_is_read_back() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("a b: #c");
        let pairs = [
            "OUT_DIR",
            out.to_str().unwrap(),
            "OPTIM.WEIGHT_DECAY",
            "1e-4",
            "OPTIM.BASE_LR",
            "1e20",
            "RNG_SEED",
            "3",
            "OPTIM.STEPS",
            "[0,15]",
            "TRAIN.MAX_STEPS",
            "9",
            "MODEL.WEIGHTS",
            "null.safetensors",
            "DATA.KIND",
            "dummy",
            "TRAIN.DATASET",
            "true",
        ];
        let config = ImageConfig::load(None, &pairs).unwrap();
        let path = config.shared.run.save(&config.to_yaml()).unwrap();
        assert_eq!(path, out.join("config.yaml"));
        assert_eq!(ImageConfig::load::<&str>(Some(&path), &[]).unwrap(), config);
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1, "nothing is left beside it");
    }

    #[test]
    fn errors_name_the_line_and_suggest_a_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("c.yaml");
        let at = |text: &str| {
            std::fs::write(&path, text).unwrap();
            ImageConfig::load::<&str>(Some(&path), &[]).unwrap_err().to_string()
        };
        let name = path.display();
        for (text, line, words) in [
            ("MODEL:\n  ARCH: resnet18\n  NUM_CLASS: 10\n", 3, "try MODEL.NUM_CLASSES"),
            ("OUT_DIR: x\nTRAIN:\n  BATCH_SIZE: many\n", 3, "expected a whole number, got many"),
            ("TRAIN:\n  BATCH_SIZE: 1.5\n", 2, "expected a whole number, got 1.5"),
            ("TRIAN:\n  BATCH_SIZE: 2\n", 2, "try TRAIN.BATCH_SIZE"),
            ("TRAIN: 7\n", 1, "has keys of its own"),
            ("OUT_DIR:\n  X: 7\n", 2, "has no keys of its own"),
        ] {
            let said = at(text);
            assert!(said.contains(&format!("{name}:{line}: ")) && said.contains(words), "{text}: {said}");
        }
        let bomb: String = (1..12)
            .map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 10].join(",")))
            .collect();
        let said = at(&format!("a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n{bomb}"));
        assert!(
            said.contains("try to write values out instead of aliases") && !said.contains("budget"),
            "{said}"
        );
        assert!(at("TRAIN: [\n").contains(&format!("{name}:")), "{}", at("TRAIN: [\n"));
        assert!(at("- 1\n").contains("try `TRAIN:`"), "{}", at("- 1\n"));
        assert!(at("RNG_SEED: 1\nRNG_SEED: 2\n").contains("RNG_SEED"));
        assert_eq!(
            ImageConfig::load::<&str>(Some(&path), &["RNG_SEED"]).unwrap_err().to_string().lines().count(),
            1
        );
    }

    #[test]
    fn invalid_pairs_are_refused() {
        assert!(said(&["TRAIN.BATCH_SIZE"]).contains("TRAIN.BATCH_SIZE has no value"));
        assert!(said(&["BATCH_SIZE", "3"]).contains("try TRAIN.BATCH_SIZE or TEST.BATCH_SIZE"));
        assert!(said(&["train.batch_size", "3"]).contains("try TRAIN.BATCH_SIZE"));
        assert!(said(&["TRAIN.SHUFFLE", "perhaps"]).contains("expected true or false"));
        assert!(said(&["OPTIM.LR_POLICY", "cosine"]).contains("expected cos or steps"));
        assert!(said(&["RNG_SEED", "1.5"]).contains("whole number"));
        assert!(said(&["TRAIN.BATCH_SIZE", "None"]).contains("expected a whole number, got None"));
        assert!(said(&["OPTIM.LR", "3"]).ends_with("try OPTIM.BASE_LR or OPTIM.MIN_LR"));
        assert!(said(&["x", "3"]).contains("try `drumline keys FILE`"), "nothing is near");
    }

    #[test]
    fn the_test_set_follows_the_training_set_unless_given() {
        let follows = ImageConfig::load(None, &["TRAIN.DATASET", "a"]).unwrap();
        assert_eq!(follows.test.dataset, Path::new("a"));
        let given = ImageConfig::load(None, &["TRAIN.DATASET", "a", "TEST.DATASET", "b"]).unwrap();
        assert_eq!(given.test.dataset, Path::new("b"));
    }

    #[test]
    fn the_guide_has_every_key_with_its_default() {
        assert_in_guide::<ImageConfig>("docs/training.md");
    }

    #[test]
    fn invalid_values_are_refused_with_advice() {
        for (pairs, words) in [
            (&["TRAIN.BATCH_SIZE", "0"][..], "TRAIN.BATCH_SIZE is 0; try 1 or more"),
            (&["OPTIM.LR_POLICY", "steps"], "OPTIM.STEPS must begin with 0"),
            (&["OPTIM.LR_POLICY", "steps", "OPTIM.STEPS", "[0, 9, 9]"], "and rise"),
            (&["OPTIM.MOMENTUM", "0"], "try OPTIM.NESTEROV False"),
            (&["OPTIM.BASE_LR", "-1"], "OPTIM.BASE_LR is -1; try 0 or more"),
            (&["MODEL.PRETRAINED", "True"], "try MODEL.WEIGHTS"),
            (&["CFG_DEST", "a/b"], "try config.yaml"),
        ] {
            let said = ImageConfig::load(None, pairs).unwrap_err().to_string();
            assert!(said.contains(words), "{pairs:?}: {said}");
        }
        let control = [
            "OPTIM.LR_POLICY",
            "steps",
            "OPTIM.STEPS",
            "[0, 9]",
            "OPTIM.MOMENTUM",
            "0",
            "OPTIM.NESTEROV",
            "False",
        ];
        ImageConfig::load(None, &control).unwrap();
    }
}
