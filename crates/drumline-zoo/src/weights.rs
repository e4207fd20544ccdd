//! A model's tensors from and to a safetensors file, by torchvision's names: Python's `safetensors.torch` reads and writes the same.
//!
//! ```text
//!   file ─▶ names and shapes held against the model's ─▶ all differences in one error, model untouched
//!                                                    └▶ none: values copied, converted to the model's dtype
//! ```
//! Not here: checkpoints, which also hold the optimizer and the place in the data (`drumline::checkpoint`).

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

use drumline_torch::parameters;
use safetensors::tensor::{Dtype, SafeTensors, TensorView, View, serialize};
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor, no_grad};

use crate::error::{Mismatch, WrongShape, ZooError};

/// Load all tensors of the model.
///
/// A file without `num_batches_tracked` is taken, as older ones have none, and names that all begin with `module.`, as PyTorch's DDP
/// writes them, are read without it.
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
    load_except(store, path, &[])
}

/// Load all but the classifier, which is the model's last layer: it keeps the weights it has.
pub fn load_backbone(store: &VarStore, path: &Path) -> Result<(), ZooError> {
    load_except(store, path, &classifier(store))
}

/// Write all tensors of the model. The file is complete or not there: what stood at `path` is replaced at the end.
pub fn save(store: &VarStore, path: &Path) -> Result<(), ZooError> {
    save_tensors(store.variables().into_iter().collect(), path)
}

/// The same with tensors by their names.
pub(crate) fn save_tensors(tensors: BTreeMap<String, Tensor>, path: &Path) -> Result<(), ZooError> {
    let failed = |source| ZooError::WriteFile { path: path.to_owned(), source };
    let stored: io::Result<Vec<_>> =
        tensors.iter().map(|(name, tensor)| Ok((name, stored(tensor)?))).collect();
    let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let bytes = stored.and_then(|stored| serialize(stored, Some(metadata)).map_err(io::Error::other));
    bytes.and_then(|bytes| replace(path, &bytes)).map_err(failed)
}

fn load_except(store: &VarStore, path: &Path, skipped: &[String]) -> Result<(), ZooError> {
    with_views(path, |mut views| {
        if views.keys().all(|name| name.starts_with(DDP_PREFIX)) {
            views = views.into_iter().map(|(name, view)| (&name[DDP_PREFIX.len()..], view)).collect();
        }
        let mut variables: BTreeMap<_, _> = store.variables().into_iter().collect();
        for name in skipped {
            views.remove(name.as_str());
            variables.remove(name);
        }
        compare(&variables, &views, path).map_err(|mismatch| explain(mismatch, &classifier(store)))?;
        copy(variables, &views, path)
    })
}

/// The tensors of a file by their names.
pub(crate) type Views<'a> = BTreeMap<&'a str, TensorView<'a>>;

/// Reads a file for as long as `body` looks at it.
pub(crate) fn with_views<T>(
    path: &Path,
    body: impl FnOnce(Views<'_>) -> Result<T, ZooError>,
) -> Result<T, ZooError> {
    let bytes = fs::read(path).map_err(|source| ZooError::ReadFile { path: path.to_owned(), source })?;
    let file = SafeTensors::deserialize(&bytes)
        .map_err(|source| ZooError::NotSafetensors { path: path.to_owned(), source })?;
    body(file.iter().collect())
}

/// Copies all of a file's tensors to variables of the same names and shapes; an error that lists all differences, and nothing is copied, where they differ.
pub(crate) fn copy_alike(
    variables: BTreeMap<String, Tensor>,
    views: &Views<'_>,
    path: &Path,
) -> Result<(), ZooError> {
    compare(&variables, views, path).map_err(|mismatch| ZooError::Weights(Box::new(mismatch)))?;
    copy(variables, views, path)
}

fn copy(variables: BTreeMap<String, Tensor>, views: &Views<'_>, path: &Path) -> Result<(), ZooError> {
    for (name, mut variable) in variables {
        if let Some(view) = views.get(name.as_str()) {
            let value = tensor(view).map_err(|message| ZooError::UnfitTensor {
                path: path.to_owned(),
                name,
                message,
            })?;
            no_grad(|| variable.copy_(&value));
        }
    }
    Ok(())
}

/// How PyTorch's DDP begins the names of what it wraps.
const DDP_PREFIX: &str = "module.";

/// All differences of names and shapes between the model and the file.
fn compare(variables: &BTreeMap<String, Tensor>, views: &Views<'_>, path: &Path) -> Result<(), Mismatch> {
    let counts_batches = |name: &str| name.ends_with("num_batches_tracked");
    let missing = variables.keys().filter(|name| !views.contains_key(name.as_str()) && !counts_batches(name));
    let unexpected = views.keys().filter(|name| !variables.contains_key(**name) && !counts_batches(name));
    let shapes = variables.iter().filter_map(|(name, tensor)| {
        let found: Vec<_> = views.get(name.as_str())?.shape().iter().map(|size| *size as i64).collect();
        let expected = tensor.size();
        (found != expected).then(|| WrongShape { name: name.clone(), expected, found })
    });
    let mismatch = Mismatch {
        path: path.to_owned(),
        missing: missing.cloned().collect(),
        unexpected: unexpected.map(|name| (*name).to_owned()).collect(),
        shapes: shapes.collect(),
    };
    match mismatch.is_empty() {
        true => Ok(()),
        false => Err(mismatch),
    }
}

/// Say so where only the number of classes differs.
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

/// Names of the last layer's tensors.
fn classifier(store: &VarStore) -> Vec<String> {
    let names: Vec<_> = parameters(store).into_iter().map(|named| named.name).collect();
    let layer = names.last().and_then(|name| name.rsplit_once('.')).map(|(layer, _)| format!("{layer}."));
    let in_layer = |name: &String| layer.as_ref().is_some_and(|layer| name.starts_with(layer));
    names.into_iter().filter(in_layer).collect()
}

const DTYPES: [(Kind, Dtype); 10] = [
    (Kind::Float, Dtype::F32),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Double, Dtype::F64),
    (Kind::Int64, Dtype::I64),
    (Kind::Int, Dtype::I32),
    (Kind::Int16, Dtype::I16),
    (Kind::Int8, Dtype::I8),
    (Kind::Uint8, Dtype::U8),
    (Kind::Bool, Dtype::BOOL),
];

fn tensor(view: &TensorView<'_>) -> Result<Tensor, String> {
    let kind = DTYPES.iter().find(|(_, dtype)| *dtype == view.dtype());
    let (kind, _) = kind.ok_or_else(|| format!("its dtype {:?} is not supported", view.dtype()))?;
    let size: Vec<_> = view.shape().iter().map(|size| *size as i64).collect();
    Tensor::f_from_data_size(view.data(), &size, *kind).map_err(|error| error.to_string())
}

/// A tensor's bytes with what the file's header says of them.
struct Stored {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

fn stored(tensor: &Tensor) -> io::Result<Stored> {
    let tensor = tensor.detach().to_device(Device::Cpu).contiguous();
    let dtype = DTYPES.iter().find(|(kind, _)| *kind == tensor.kind());
    let (kind, dtype) = dtype.ok_or_else(|| io::Error::other(format!("no dtype for {:?}", tensor.kind())))?;
    let mut bytes = vec![0; tensor.numel() * kind.elt_size_in_bytes()];
    tensor.f_copy_data_u8(&mut bytes, tensor.numel()).map_err(io::Error::other)?;
    Ok(Stored { dtype: *dtype, shape: tensor.size().iter().map(|size| *size as usize).collect(), bytes })
}

impl View for Stored {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        Cow::Borrowed(&self.bytes)
    }

    fn data_len(&self) -> usize {
        self.bytes.len()
    }
}

/// Write beside, make sure that it is on the disk, then move it into place.
fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut partial = path.as_os_str().to_owned();
    partial.push(".partial");
    let mut file = File::create(&partial)?;
    let written =
        file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial);
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::{ModelOptions, build};

    fn model(arch: &str, num_classes: i64) -> VarStore {
        let store = VarStore::new(Device::Cpu);
        build(arch, &store.root(), &ModelOptions { num_classes, ..Default::default() }).unwrap();
        store
    }

    fn same(a: &VarStore, b: &VarStore, name: &str) -> bool {
        a.variables()[name] == b.variables()[name]
    }

    #[test]
    fn what_is_saved_is_loaded() {
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
    fn another_class_count_is_said_and_the_backbone_still_loads() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("weights.safetensors");
        let (first, second) = (model("convnet", 5), model("convnet", 7));
        save(&first, &file).unwrap();
        let refused = load(&second, &file).unwrap_err().to_string();
        assert!(refused.contains("5 classes") && refused.contains("NUM_CLASSES 5"), "{refused}");
        assert!(!same(&first, &second, "conv1.weight"), "nothing is loaded by halves");
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
    fn files_that_are_none_are_refused() {
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
        assert!(refused(&store).contains("is no safetensors file, or damaged"), "{}", refused(&store));
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
