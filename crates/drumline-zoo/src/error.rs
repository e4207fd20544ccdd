//! Errors of models, weights and datasets.

use std::fmt;
use std::io;
use std::path::PathBuf;

use drumline::checkpoint::safetensors::SafetensorsError;
use drumline::engine::ParallelError;

use crate::models;

/// An error of a model, its weights or a dataset.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZooError {
    /// There is no model of this name.
    #[error("there is no model `{arch}`; try {}", nearest(arch))]
    UnknownArch {
        /// The name.
        arch: String,
    },
    /// A file or folder cannot be read.
    #[error("cannot read {path:?}: {source}")]
    ReadFile {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {path:?}: {source}")]
    WriteFile {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The weights are not in safetensors format, or the file is truncated.
    #[error(
        "{path:?} is not a safetensors file, or is damaged: {source}; try to write it again, in Python with safetensors.torch.save_file(model.state_dict(), …)"
    )]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<SafetensorsError>,
    },
    /// A tensor of the file cannot be loaded.
    #[error("tensor `{name}` of {path:?} cannot be loaded: {message}")]
    UnfitTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Why.
        message: String,
    },
    /// The file's tensors differ from the model's.
    #[error(transparent)]
    Weights(Box<Mismatch>),
    /// The file is for the same model with another number of classes.
    #[error(
        "the weights in {path:?} are for {found} classes, the model has {expected}; try MODEL.NUM_CLASSES {found}, or MODEL.NEW_CLASSIFIER True to train a new last layer"
    )]
    ClassCount {
        /// The file.
        path: PathBuf,
        /// Classes in the file.
        found: i64,
        /// Classes of the model.
        expected: i64,
    },
    /// The folder has no CIFAR files.
    #[error(
        "no CIFAR data in {path:?}: neither data_batch_1.bin (CIFAR-10) nor train.bin (CIFAR-100); try `drumline data synth-cifar --out {}`, or unpack the binary version of CIFAR there",
        path.display()
    )]
    NoCifar {
        /// The folder.
        path: PathBuf,
    },
    /// A file of a dataset is damaged.
    #[error("data file {path:?} {what}; try to fetch or make it again")]
    DamagedData {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file exists with other content.
    #[error("{path:?} exists with other content and was not changed; try another folder, or remove it")]
    InTheWay {
        /// The file.
        path: PathBuf,
    },
    /// There are fewer images than files.
    #[error("{train} training and {test} test images are too few; try at least 5 and 1, one for each file")]
    TooFewImages {
        /// The number of training images.
        train: usize,
        /// The number of test images.
        test: usize,
    },
    /// The folder has no class folders.
    #[error(
        "no class folders in {path:?}, expected one for each class with its images; try another DATASET or SPLIT"
    )]
    NoClasses {
        /// The folder.
        path: PathBuf,
    },
    /// A class folder has no images.
    #[error(
        "no JPEG or PNG files in class folder {path:?}; try to remove the folder or to fetch its images again"
    )]
    EmptyClass {
        /// The folder.
        path: PathBuf,
    },
    /// The dataset has another number of classes than the model.
    #[error("the data in {path:?} has {found} classes, the model {expected}; try MODEL.NUM_CLASSES {found}")]
    DataClasses {
        /// The dataset.
        path: PathBuf,
        /// Classes in the dataset.
        found: i64,
        /// Classes of the model.
        expected: i64,
    },
    /// Sizes or options that cannot be used together.
    #[error("{what}; try {fix}")]
    Unsuitable {
        /// What is wrong.
        what: String,
        /// What to try.
        fix: String,
    },
    /// An error of libtorch.
    #[error(transparent)]
    Torch(#[from] drumline_torch::TorchError),
    /// A model that is cut among ranks.
    #[error(transparent)]
    Parallel(Box<ParallelError>),
}

impl From<ParallelError> for ZooError {
    fn from(error: ParallelError) -> Self {
        Self::Parallel(Box::new(error))
    }
}

/// The differences between a weights file and a model.
#[derive(Debug, thiserror::Error)]
pub struct Mismatch {
    /// The file.
    pub path: PathBuf,
    /// Tensors that are only in the model.
    pub missing: Vec<String>,
    /// Tensors that are only in the file.
    pub unexpected: Vec<String>,
    /// Tensors with different shapes.
    pub shapes: Vec<WrongShape>,
}

/// A tensor that has another shape in the file.
#[derive(Debug)]
pub struct WrongShape {
    /// Its name.
    pub name: String,
    /// Its shape in the model.
    pub expected: Vec<i64>,
    /// Its shape in the file.
    pub found: Vec<i64>,
}

impl Mismatch {
    /// Whether there is no difference.
    pub fn is_empty(&self) -> bool {
        self.missing.is_empty() && self.unexpected.is_empty() && self.shapes.is_empty()
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = |wrong: &WrongShape| {
            format!("{} is {:?}, the model's {:?}", wrong.name, wrong.found, wrong.expected)
        };
        let shapes: Vec<_> = self.shapes.iter().map(shape).collect();
        write!(f, "the weights in {:?} are of another model", self.path)?;
        let lists = [("missing", &self.missing), ("unexpected", &self.unexpected), ("wrong shape", &shapes)];
        for (what, list) in lists.iter().filter(|(_, list)| !list.is_empty()) {
            write!(f, "; {what}: {}", list.iter().take(LISTED).cloned().collect::<Vec<_>>().join(", "))?;
            if list.len() > LISTED {
                write!(f, " and {} more", list.len() - LISTED)?;
            }
        }
        write!(f, "; try the configuration that they were saved with")
    }
}

/// The most names that an error message lists.
const LISTED: usize = 8;

/// The model names that are most similar to `arch`, or all names if none is similar.
fn nearest(arch: &str) -> String {
    let alike = |name: &str| strsim::jaro_winkler(&arch.to_lowercase(), name);
    let mut names: Vec<_> = models::names().filter(|name| alike(name) > 0.8).collect();
    names.sort_by(|a, b| alike(b).total_cmp(&alike(a)));
    names.truncate(3);
    if names.is_empty() {
        format!("one of {}", models::names().collect::<Vec<_>>().join(", "))
    } else {
        names.join(" or ")
    }
}
