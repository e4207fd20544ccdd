//! The sections into which a checkpoint's tensors are divided, and the names of their files.
//!
//! Names of tensors are unique in a checkpoint, because PyTorch reads all files of a folder at once: `fc.weight` is the
//! model's, `fc.weight.exp_avg` the optimizer's, `fc.weight.trained` the trained parameter, `0.cpu` a random number
//! generator.

use drumline_torch::Named;
use serde::{Deserialize, Serialize};

/// A kind of tensors in a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Section {
    /// Parameters and buffers.
    Model,
    /// The trained parameters, if those of the model are averages of them.
    Trained,
    /// What the optimizer keeps for each parameter.
    Optimizer,
    /// The generators of random numbers.
    Rng,
}

impl Section {
    /// All sections, in the order of a manifest.
    pub(super) const ALL: [Self; 4] = [Self::Model, Self::Trained, Self::Optimizer, Self::Rng];

    /// Its name in a manifest.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Trained => "trained",
            Self::Optimizer => "optimizer",
            Self::Rng => "rng",
        }
    }

    /// The file if one rank writes the whole section: `model.safetensors`.
    pub fn file(self) -> String {
        format!("{}.safetensors", self.name())
    }

    /// The file of one rank if several ranks write, with the name that PyTorch's distributed checkpoints give it.
    ///
    /// ```
    /// use drumline::checkpoint::Section;
    ///
    /// assert_eq!(Section::Model.shard_file(0), "shard-00001-model-00001-of-00001.safetensors");
    /// ```
    pub fn shard_file(self, rank: usize) -> String {
        self.shard_file_of(rank, 0, 1)
    }

    /// The nth of several files of one rank.
    pub(super) fn shard_file_of(self, rank: usize, nth: usize, count: usize) -> String {
        format!("shard-{:05}-{}-{:05}-of-{count:05}.safetensors", rank + 1, self.name(), nth + 1)
    }
}

/// The suffix of trained parameters, whose names the model has as well.
const TRAINED: &str = ".trained";

/// The name of a trained parameter in files.
pub(super) fn with_suffix(name: &str) -> String {
    format!("{name}{TRAINED}")
}

/// The name in the model of a parameter or trained parameter.
pub(super) fn plain_name(name: &str) -> &str {
    name.strip_suffix(TRAINED).unwrap_or(name)
}

/// The trained parameters under the model's names. Format 1 had these names in its files.
pub(super) fn without_suffix(trained: Vec<Named>) -> Vec<Named> {
    let named = |named: Named| Named { name: plain_name(&named.name).to_owned(), ..named };
    trained.into_iter().map(named).collect()
}
