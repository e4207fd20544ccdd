//! What can go wrong with models, weights and data sets.

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
}

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
