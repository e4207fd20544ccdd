//! What can go wrong with models, weights and data sets.

use std::fmt;
use std::io;
use std::path::PathBuf;

use safetensors::SafeTensorError;

use crate::models;

/// An error of a model, its weights or a data set.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ZooError {
    /// No model of that name.
    #[error("there is no model `{arch}`; try {}", nearest(arch))]
    UnknownArch {
        /// The name as given.
        arch: String,
    },
    /// A file or folder cannot be read.
    #[error("cannot read {path:?}: {source}")]
    ReadFile {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {path:?}: {source}")]
    WriteFile {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Weights in another format, or cut short.
    #[error(
        "{path:?} is no safetensors file, or damaged: {source}; try to write it again, from Python by safetensors.torch.save_file(model.state_dict(), …)"
    )]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: SafeTensorError,
    },
    /// A tensor of the file cannot be used.
    #[error("tensor `{name}` of {path:?} cannot be loaded: {message}")]
    UnfitTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// Why.
        message: String,
    },
    /// The file has other tensors than the model.
    #[error(transparent)]
    Weights(Box<Mismatch>),
    /// The file is of the same model with another number of classes.
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
    /// No CIFAR there.
    #[error(
        "no CIFAR data in {path:?}: neither data_batch_1.bin (CIFAR-10) nor train.bin (CIFAR-100); try `drumline data synth-cifar --out {}`, or unpack the binary version of CIFAR there",
        path.display()
    )]
    NoCifar {
        /// The folder.
        path: PathBuf,
    },
    /// A file of a data set is not as it should be.
    #[error("data file {path:?} {what}; try to fetch or make it again")]
    DamagedData {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// Another file would be overwritten.
    #[error("{path:?} is there, with other content, and is left as it is; try another folder, or remove it")]
    InTheWay {
        /// The file.
        path: PathBuf,
    },
    /// Fewer images than files to put them in.
    #[error("{train} training and {test} test images are too few; try at least 5 and 1, one for each file")]
    TooFewImages {
        /// Asked for in training.
        train: usize,
        /// Asked for in the test.
        test: usize,
    },
    /// No folders of classes.
    #[error(
        "no class folders in {path:?}, expected one for each class with its images; try another DATASET or SPLIT"
    )]
    NoClasses {
        /// The folder.
        path: PathBuf,
    },
    /// A class without images.
    #[error(
        "no JPEG or PNG files in class folder {path:?}; try to remove the folder or to fetch its images again"
    )]
    EmptyClass {
        /// The folder.
        path: PathBuf,
    },
    /// The data has another number of classes than the model.
    #[error("the data in {path:?} has {found} classes, the model {expected}; try MODEL.NUM_CLASSES {found}")]
    DataClasses {
        /// The data set.
        path: PathBuf,
        /// Classes of the data.
        found: i64,
        /// Classes of the model.
        expected: i64,
    },
    /// Sizes or options that do not fit together.
    #[error("{what}; try {fix}")]
    Unsuitable {
        /// What does not fit.
        what: String,
        /// What would.
        fix: String,
    },
    /// libtorch refuses.
    #[error(transparent)]
    Torch(#[from] drumline_torch::TorchError),
}

/// How a file of weights differs from the model.
#[derive(Debug, thiserror::Error)]
pub struct Mismatch {
    /// The file.
    pub path: PathBuf,
    /// In the model, not in the file.
    pub missing: Vec<String>,
    /// In the file, not in the model.
    pub unexpected: Vec<String>,
    /// In both, with different shapes.
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

/// Names shown of each list: enough to see what kind of names they are.
const LISTED: usize = 8;

/// The names that look most like `arch`, or all of them where none does.
fn nearest(arch: &str) -> String {
    let alike = |name: &str| strsim::jaro_winkler(&arch.to_lowercase(), name);
    let mut names: Vec<_> = models::names().filter(|name| alike(name) > 0.8).collect();
    names.sort_by(|a, b| alike(b).total_cmp(&alike(a)));
    names.truncate(3);
    match names.is_empty() {
        true => format!("one of {}", models::names().collect::<Vec<_>>().join(", ")),
        false => names.join(" or "),
    }
}
