//! How the layers of a stage are built: only those of this rank, with the names and the first values of the whole model.
//!
//! A layer's first values are drawn from (seed, its name), so that they do not depend on which layers a rank builds. A tied
//! variable is drawn from (seed, the variable's name), so that all of its layers begin with the same values.

use std::sync::{Mutex, PoisonError};

use drumline_torch::RngState;
use tch::Tensor;
use tch::nn::{Path, VarStore};

use super::layer::{Layer, LayerError, LayerSpec, Tie, layer_failed};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// libtorch's generators belong to the process, and ranks may be threads of one.
static GENERATORS: Mutex<()> = Mutex::new(());

/// What all layers of a stage share while they are built.
pub(super) struct Shared<'a> {
    pub(super) store: &'a VarStore,
    pub(super) ties: &'a [Tie],
    pub(super) seed: u64,
}

impl Shared<'_> {
    pub(super) fn build(&self, spec: &LayerSpec) -> Result<Box<dyn Layer>> {
        let _alone = GENERATORS.lock().unwrap_or_else(PoisonError::into_inner);
        let before = RngState::capture()?;
        RngState::seeded(seed_of(self.seed, &spec.name))?.restore()?;
        let built = (spec.build)(&LayerBuilder { shared: self, layer: &spec.name });
        before.restore()?;
        built.map_err(|cause| layer_failed(&spec.name, &cause))
    }
}

/// FNV-1a, the same in every version: it is part of what a seed means.
fn seed_of(seed: u64, name: &str) -> u64 {
    let bytes = seed.to_le_bytes().into_iter().chain(name.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// What a layer needs to build itself.
pub struct LayerBuilder<'a> {
    shared: &'a Shared<'a>,
    layer: &'a str,
}

impl std::fmt::Debug for LayerBuilder<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LayerBuilder").field("layer", &self.layer).finish_non_exhaustive()
    }
}

impl<'a> LayerBuilder<'a> {
    /// Where the model's variables are.
    pub fn root(&self) -> Path<'a> {
        self.shared.store.root()
    }

    /// Where this layer's variables are: under its name, in which dots separate parts.
    pub fn path(&self) -> Path<'a> {
        self.layer.split('.').fold(self.root(), |path, part| path / part)
    }

    /// A variable that this layer has in common with others ([`LayerList::tie`](super::LayerList::tie)). `create` makes it
    /// at a path, with a name, if no layer before it on this rank has done so.
    pub fn tied(
        &self,
        variable: &str,
        create: impl FnOnce(&Path<'_>, &str) -> Tensor,
    ) -> std::result::Result<Tensor, LayerError> {
        let Shared { store, ties, seed } = self.shared;
        let is_declared =
            |tie: &&Tie| tie.variable == variable && tie.layers.iter().any(|name| name == self.layer);
        if !ties.iter().any(|tie| is_declared(&tie)) {
            let layer = self.layer;
            return Err(format!("`{variable}` is not tied to `{layer}`; try LayerList::tie with both").into());
        }
        if let Some(found) = store.variables().remove(variable) {
            if found.device() != store.device() {
                let (on, expected) = (found.device(), store.device());
                return Err(format!("`{variable}` is on {on:?} and this stage on {expected:?}; try one device for all stages that it ties").into());
            }
            return Ok(found);
        }
        let (path, name) = match variable.rsplit_once('.') {
            Some((path, name)) => (path.split('.').fold(self.root(), |path, part| path / part), name),
            None => (self.root(), variable),
        };
        let before = RngState::capture()?;
        RngState::seeded(seed_of(*seed, variable))?.restore()?;
        let made = create(&path, name);
        before.restore()?;
        Ok(made)
    }
}
