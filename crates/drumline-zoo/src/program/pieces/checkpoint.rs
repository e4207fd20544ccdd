//! The state of a run on disk: a folder for each save, and a file that names the last.

use std::fs;
use std::path::Path;

use anyhow::Context;
use drumline::ProcessGroup;
use drumline_torch::{Named, buffers, parameters};
use serde::{Deserialize, Serialize};
use tch::nn::VarStore;
use tch::{Tensor, no_grad};

use super::optimizer::Sgd;
use crate::program::trainer::Position;

const FOLDER: &str = "checkpoints";
const LATEST: &str = "latest";

pub(in crate::program) struct TrainState {
    model: Vec<Named>,
    optimizer: Vec<Named>,
    pub(in crate::program) at: Position,
    /// Of the epoch under way, over all ranks.
    pub(in crate::program) samples_seen: u64,
}

#[derive(Serialize, Deserialize)]
struct Manifest {
    epoch: u64,
    step: u64,
    best: f64,
    samples_seen: u64,
}

impl TrainState {
    pub(in crate::program) fn of(store: &VarStore, optimizer: &Sgd, at: Position, samples_seen: u64) -> Self {
        let model = parameters(store).into_iter().chain(buffers(store)).collect();
        Self { model, optimizer: optimizer.state(), at, samples_seen }
    }

    /// Puts the weights into the model, and the rest into the optimizer if it is given.
    pub(in crate::program) fn restore(
        &self,
        store: &VarStore,
        optimizer: Option<&mut Sgd>,
    ) -> anyhow::Result<()> {
        for named in parameters(store).into_iter().chain(buffers(store)) {
            let saved = self.model.iter().find(|saved| saved.name == named.name);
            let saved = saved.with_context(|| format!("the checkpoint has no {}", named.name))?;
            no_grad(|| named.tensor.shallow_clone().f_copy_(&saved.tensor))
                .with_context(|| format!("the checkpoint's {} has another shape", named.name))?;
        }
        if let Some(optimizer) = optimizer {
            optimizer.load_state(&self.optimizer);
        }
        Ok(())
    }
}

/// Rank 0 writes; the others have the same.
pub(in crate::program) fn save(
    out_dir: &Path,
    state: &TrainState,
    group: &ProcessGroup,
) -> anyhow::Result<()> {
    if group.rank() != 0 {
        return Ok(());
    }
    let Position { epoch, step, best, .. } = state.at;
    let (name, root) = (format!("step-{step:08}"), out_dir.join(FOLDER));
    let (beside, place) = (root.join(format!("{name}.tmp")), root.join(&name));
    let write = || -> anyhow::Result<()> {
        fs::create_dir_all(&beside)?;
        write_tensors(&state.model, &beside.join("model.safetensors"))?;
        write_tensors(&state.optimizer, &beside.join("optimizer.safetensors"))?;
        let manifest = Manifest { epoch, step, best, samples_seen: state.samples_seen };
        fs::write(beside.join("manifest.json"), serde_json::to_string(&manifest)?)?;
        if place.exists() {
            fs::remove_dir_all(&place)?;
        }
        fs::rename(&beside, &place)?;
        let latest = root.join(format!("{LATEST}.tmp"));
        fs::write(&latest, &name)?;
        Ok(fs::rename(latest, root.join(LATEST))?)
    };
    write().with_context(|| format!("cannot write the checkpoint {}", place.display()))
}

/// The weights alone, of the best evaluation so far.
pub(in crate::program) fn save_best(
    out_dir: &Path,
    store: &VarStore,
    group: &ProcessGroup,
) -> anyhow::Result<()> {
    if group.rank() != 0 {
        return Ok(());
    }
    let path = out_dir.join(FOLDER).join("best.safetensors");
    let model: Vec<_> = parameters(store).into_iter().chain(buffers(store)).collect();
    let beside = path.with_extension("tmp");
    write_tensors(&model, &beside)?;
    fs::rename(beside, &path).with_context(|| format!("cannot write {}", path.display()))
}

/// The last checkpoint of the folder, if there is one.
pub(in crate::program) fn load_latest(out_dir: &Path) -> anyhow::Result<Option<TrainState>> {
    let root = out_dir.join(FOLDER);
    let Ok(name) = fs::read_to_string(root.join(LATEST)) else { return Ok(None) };
    let place = root.join(name.trim());
    let read = || -> anyhow::Result<TrainState> {
        let manifest: Manifest = serde_json::from_str(&fs::read_to_string(place.join("manifest.json"))?)?;
        let Manifest { epoch, step, best, samples_seen } = manifest;
        let at = Position { epoch, in_epoch: 0, step, saved: Some(step), best };
        let model = read_tensors(&place.join("model.safetensors"))?;
        let optimizer = read_tensors(&place.join("optimizer.safetensors"))?;
        Ok(TrainState { model, optimizer, at, samples_seen })
    };
    read().map(Some).with_context(|| format!("cannot read the checkpoint {}", place.display()))
}

fn write_tensors(tensors: &[Named], path: &Path) -> anyhow::Result<()> {
    let pairs: Vec<_> = tensors.iter().map(|named| (named.name.as_str(), &named.tensor)).collect();
    Ok(Tensor::write_safetensors(&pairs, path)?)
}

fn read_tensors(path: &Path) -> anyhow::Result<Vec<Named>> {
    let tensors = Tensor::read_safetensors(path)?.into_iter();
    Ok(tensors.map(|(name, tensor)| Named { name, tensor }).collect())
}
