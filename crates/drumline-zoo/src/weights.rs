//! Loads and saves a model's tensors as safetensors with torchvision's names. Python's `safetensors.torch` reads and
//! writes the same files.
//!
//! ```text
//!   file ─▶ names and shapes compared with the model's ─▶ all differences in one error, model untouched
//!                                                    └▶ none: values copied, converted to the model's dtype
//! ```
//! The format is implemented in `drumline::checkpoint::safetensors`. Checkpoints, which also contain the optimizer and
//! the position in the data, are in `drumline::checkpoint`.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

use drumline::checkpoint::safetensors::{self, SafetensorsError};
use drumline::checkpoint::{CheckpointError, Section, ShardReader};
use drumline::engine::Part;
use drumline_torch::{Named, TorchError, bytes, parameters};
use tch::nn::VarStore;
use tch::{Device, Tensor};

use crate::error::{Mismatch, WrongShape, ZooError};
use crate::first_weights::FirstWeights;

/// Loads all tensors of the model.
///
/// A file without `num_batches_tracked` is accepted, because older files have none. If all names begin with `module.`,
/// as PyTorch's DDP writes them, the prefix is removed.
///
/// ```
/// use drumline_zoo::{models, weights};
/// use tch::{Device, nn::VarStore};
///
/// let folder = tempfile::tempdir()?;
/// let file = folder.path().join("mlp.safetensors");
/// let (first, second) = (VarStore::new(Device::Cpu), VarStore::new(Device::Cpu));
/// let options = models::ModelOptions { num_classes: 10, ..Default::default() };
/// models::build("mlp", &first.root(), &options)?;
/// models::build("mlp", &second.root(), &options)?;
/// weights::save(&first, &file)?;
/// weights::load(&second, &file)?;
/// assert_eq!(first.variables()["fc1.weight"], second.variables()["fc1.weight"]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn load(store: &VarStore, path: &Path) -> Result<(), ZooError> {
    load_except(store, path, &BTreeSet::new())
}

/// Which of a model's tensors a rank has; by default all of them.
#[derive(Debug, Clone, Default)]
pub struct Holding {
    /// The variables that are parts of tensors.
    pub parts: Vec<Part>,
    /// The names of tensors that only other ranks have.
    pub elsewhere: BTreeSet<String>,
}

/// Loads what this rank holds of a model that is cut among ranks. The files are those of whole models.
pub fn load_parts(store: &VarStore, holding: &Holding, path: &Path) -> Result<(), ZooError> {
    if holding.parts.is_empty() {
        return load_except(store, path, &holding.elsewhere);
    }
    if FirstWeights::of_this_build().leaves(path) {
        return Ok(());
    }
    let mut saved = read(path)?;
    saved.retain(|name, _| !holding.elsewhere.contains(name));
    copy_parts(store.variables().into_iter().collect(), &holding.parts, &saved, path)
}

/// Loads all tensors but the classifier, which is the last layer and keeps its current weights.
pub fn load_backbone(store: &VarStore, path: &Path) -> Result<(), ZooError> {
    load_except(store, path, &classifier(store).into_iter().collect())
}

/// Writes all tensors of the model. The file is replaced atomically.
pub fn save(store: &VarStore, path: &Path) -> Result<(), ZooError> {
    save_tensors(store.variables().into_iter().collect(), path)
}

/// Writes tensors by name.
pub(crate) fn save_tensors(tensors: Tensors, path: &Path) -> Result<(), ZooError> {
    let tensors: Vec<_> = tensors.into_iter().map(|(name, tensor)| Named { name, tensor }).collect();
    safetensors::write(path, &tensors).map_err(|error| {
        let source = match error {
            SafetensorsError::Io(source) => source,
            error => io::Error::other(error),
        };
        ZooError::WriteFile { path: path.to_owned(), source }
    })
}

/// Loads all tensors but those of these names.
pub(crate) fn load_except(store: &VarStore, path: &Path, skipped: &BTreeSet<String>) -> Result<(), ZooError> {
    if FirstWeights::of_this_build().leaves(path) {
        return Ok(());
    }
    let mut saved = read(path)?;
    if saved.keys().all(|name| name.starts_with(DDP_PREFIX)) {
        saved =
            saved.into_iter().map(|(name, tensor)| (name[DDP_PREFIX.len()..].to_owned(), tensor)).collect();
    }
    let mut variables: Tensors = store.variables().into_iter().collect();
    for name in skipped {
        saved.remove(name);
        variables.remove(name);
    }
    compare(&variables, &saved, path).map_err(|mismatch| explain(mismatch, &classifier(store)))?;
    copy(variables, &saved)
}

/// Tensors by name.
pub(crate) type Tensors = BTreeMap<String, Tensor>;

/// All tensors of a file, which stay there until they are used, or of a folder to which several ranks have written their
/// parts.
pub(crate) fn read(path: &Path) -> Result<Tensors, ZooError> {
    if path.is_dir() {
        return read_shards(path)
            .map_err(|error| ZooError::ReadFile { path: path.to_owned(), source: io::Error::other(error) });
    }
    let path = path.to_owned();
    safetensors::map(&path).map_err(|error| match error {
        SafetensorsError::NoKind { ref name, .. } => {
            ZooError::UnfitTensor { path, name: name.clone(), message: error.to_string() }
        }
        SafetensorsError::Io(source) if source.kind() != io::ErrorKind::UnexpectedEof => {
            ZooError::ReadFile { path, source }
        }
        source if source.is_malformed() => ZooError::NotSafetensors { path, source: Box::new(source) },
        error => ZooError::ReadFile { path, source: io::Error::other(error) },
    })
}

/// Reads the model of a checkpoint, or all tensors of a folder without a manifest, such as one that FSDP2 has written.
fn read_shards(folder: &Path) -> Result<Tensors, CheckpointError> {
    let is_ours = folder.join("manifest.json").is_file();
    let reader =
        if is_ours { ShardReader::open_section(folder, Section::Model)? } else { ShardReader::open(folder)? };
    reader.names().map(|name| Ok((name.to_owned(), reader.read_whole(name)?))).collect()
}

/// Removes the tensor `tied` from the tensors of a Hugging Face file; the model has it only as `to`. Returns an error
/// if their values differ.
pub(crate) fn remove_tied(saved: &mut Tensors, tied: &str, to: &str, path: &Path) -> Result<(), ZooError> {
    match (saved.remove(tied), saved.get(to)) {
        (Some(one), Some(other)) if !is_same(&one, other) => Err(ZooError::UnfitTensor {
            path: path.to_owned(),
            name: tied.to_owned(),
            message: format!(
                "its values are not those of {to}, expected the same: the model here has one tensor for both; try weights that \
                 were trained with tie_word_embeddings"
            ),
        }),
        _ => Ok(()),
    }
}

/// Whether two tensors are equal to the bit.
fn is_same(one: &Tensor, other: &Tensor) -> bool {
    let have_same_bytes = || matches!((bytes(one), bytes(other)), (Ok(one), Ok(other)) if one == other);
    one.kind() == other.kind() && one.size() == other.size() && have_same_bytes()
}

/// Copies a file's tensors to the variables of the same names. If names or shapes differ, it copies nothing and returns
/// an error that lists all differences.
pub(crate) fn copy_alike(variables: Tensors, saved: &Tensors, path: &Path) -> Result<(), ZooError> {
    compare(&variables, saved, path).map_err(|mismatch| ZooError::Weights(Box::new(mismatch)))?;
    copy(variables, saved)
}

/// The same of variables of which some are `parts` of the file's tensors.
pub(crate) fn copy_parts(
    variables: Tensors,
    parts: &[Part],
    saved: &Tensors,
    path: &Path,
) -> Result<(), ZooError> {
    let part_of = |name: &str| parts.iter().find(|part| part.whole.name == name);
    // Views of one element with the sizes of the wholes.
    let mut wholes = Tensors::new();
    for (name, variable) in &variables {
        let whole = match part_of(name) {
            Some(part) => Tensor::f_zeros([1], (variable.kind(), Device::Cpu))
                .and_then(|one| one.f_expand(&part.whole.size, false))
                .map_err(TorchError::from)?,
            None => variable.shallow_clone(),
        };
        wholes.insert(name.clone(), whole);
    }
    compare(&wholes, saved, path).map_err(|mismatch| ZooError::Weights(Box::new(mismatch)))?;
    let mut own = Tensors::new();
    for (name, value) in saved {
        let value = match (part_of(name), variables.get(name)) {
            (Some(part), Some(variable)) => part.of(value, &variable.size())?,
            _ => value.shallow_clone(),
        };
        own.insert(name.clone(), value);
    }
    copy(variables, &own)
}

fn copy(variables: Tensors, saved: &Tensors) -> Result<(), ZooError> {
    let first_weights = FirstWeights::of_this_build();
    variables.into_iter().try_for_each(|(name, mut variable)| match saved.get(&name) {
        Some(value) => first_weights.fill(&mut variable, value),
        None => Ok(()),
    })
}

/// The prefix that PyTorch's DDP adds to names.
const DDP_PREFIX: &str = "module.";

/// All differences in names and shapes between the model and the file.
fn compare(variables: &Tensors, saved: &Tensors, path: &Path) -> Result<(), Mismatch> {
    let counts_batches = |name: &str| name.ends_with("num_batches_tracked");
    let missing = variables.keys().filter(|name| !saved.contains_key(*name) && !counts_batches(name));
    let unexpected = saved.keys().filter(|name| !variables.contains_key(*name) && !counts_batches(name));
    let shapes = variables.iter().filter_map(|(name, tensor)| {
        let (found, expected) = (saved.get(name)?.size(), tensor.size());
        (found != expected).then(|| WrongShape { name: name.clone(), expected, found })
    });
    let mismatch = Mismatch {
        path: path.to_owned(),
        missing: missing.cloned().collect(),
        unexpected: unexpected.cloned().collect(),
        shapes: shapes.collect(),
    };
    if mismatch.is_empty() { Ok(()) } else { Err(mismatch) }
}

/// Explains a mismatch if only the number of classes differs.
fn explain(mismatch: Mismatch, classifier: &[String]) -> ZooError {
    let Mismatch { path, missing, unexpected, shapes } = &mismatch;
    let same_but_first = |wrong: &WrongShape| wrong.found.get(1..) == wrong.expected.get(1..);
    let classes_only = shapes.iter().all(|wrong| classifier.contains(&wrong.name) && same_but_first(wrong));
    match shapes.first() {
        Some(wrong) if missing.is_empty() && unexpected.is_empty() && classes_only => {
            ZooError::ClassCount { path: path.clone(), found: wrong.found[0], expected: wrong.expected[0] }
        }
        _ => ZooError::Weights(Box::new(mismatch)),
    }
}

/// The names of the last layer's tensors.
fn classifier(store: &VarStore) -> Vec<String> {
    let names: Vec<_> = parameters(store).into_iter().map(|named| named.name).collect();
    let layer = names.last().and_then(|name| name.rsplit_once('.')).map(|(layer, _)| format!("{layer}."));
    let in_layer = |name: &String| layer.as_ref().is_some_and(|layer| name.starts_with(layer));
    names.into_iter().filter(in_layer).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::models::{ModelOptions, build};
    use tch::{Device, Kind};

    fn model(arch: &str, num_classes: i64) -> VarStore {
        let store = VarStore::new(Device::Cpu);
        build(arch, &store.root(), &ModelOptions { num_classes, ..Default::default() }).unwrap();
        store
    }

    fn same(a: &VarStore, b: &VarStore, name: &str) -> bool {
        a.variables()[name] == b.variables()[name]
    }

    #[test]
    fn saved_weights_are_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        let (first, second) = (model("convnet", 5), model("convnet", 5));
        let _ = first.variables()["bn2.num_batches_tracked"].shallow_clone().fill_(41);
        save(&first, &file).unwrap();
        load(&second, &file).unwrap();
        assert!(first.variables().keys().all(|name| same(&first, &second, name)));
        assert_eq!(second.variables()["bn2.num_batches_tracked"].int64_value(&[]), 41);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1, "nothing is left beside the file");
    }

    #[test]
    fn another_class_count_is_reported_and_the_backbone_still_loads() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        let (first, second) = (model("convnet", 5), model("convnet", 7));
        save(&first, &file).unwrap();
        let refused = load(&second, &file).unwrap_err().to_string();
        assert!(refused.contains("5 classes") && refused.contains("NUM_CLASSES 5"), "{refused}");
        assert!(!same(&first, &second, "conv1.weight"), "a file that does not match is not loaded in part");
        load_backbone(&second, &file).unwrap();
        assert!(same(&first, &second, "conv1.weight") && second.variables()["fc.weight"].size() == [7, 128]);
    }

    #[test]
    fn every_difference_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        save(&model("mlp", 5), &file).unwrap();
        let refused = load(&model("convnet", 5), &file).unwrap_err().to_string();
        for part in ["missing: bn1.bias", "unexpected: fc1.bias, fc1.weight", "and 9 more"] {
            assert!(refused.contains(part), "no `{part}` in: {refused}");
        }
        let store = VarStore::new(Device::Cpu);
        let _ = store.root().sub("fc1").zeros("bias", &[3]);
        let refused = load(&store, &file).unwrap_err().to_string();
        assert!(refused.contains("fc1.bias is [64], the model's [3]"), "{refused}");
    }

    #[test]
    fn files_of_another_format_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.pth");
        let refused = |store: &VarStore| load(store, &file).unwrap_err().to_string();
        let store = model("mlp", 5);
        assert!(refused(&store).contains("cannot read"));
        fs::write(&file, b"PK\x03\x04 a zip file, as torch.save writes").unwrap();
        assert!(refused(&store).contains("safetensors.torch.save_file"), "{}", refused(&store));
        save(&store, &file).unwrap();
        let bytes = fs::read(&file).unwrap();
        fs::write(&file, &bytes[..bytes.len() - 1]).unwrap();
        assert!(refused(&store).contains("is not a safetensors file, or is damaged"), "{}", refused(&store));
        assert!(
            save(&store, &folder.path().join("no/such/folder"))
                .unwrap_err()
                .to_string()
                .contains("cannot write")
        );
    }

    #[test]
    fn names_of_ddp_and_other_dtypes_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        let wrapped = VarStore::new(Device::Cpu);
        let options = ModelOptions { num_classes: 5, ..Default::default() };
        build("mlp", &(wrapped.root() / "module"), &options).unwrap();
        wrapped.root().set_kind(Kind::BFloat16);
        save(&wrapped, &file).unwrap();
        let store = model("mlp", 5);
        load(&store, &file).unwrap();
        let loaded = &store.variables()["fc2.weight"];
        assert_eq!(loaded.kind(), Kind::Float);
        assert_eq!(*loaded, wrapped.variables()["module.fc2.weight"].to_kind(Kind::Float));
    }
}
