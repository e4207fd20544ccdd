//! How the layers of a stage are built: only those of this rank, with the names and the first values of the whole model.
//!
//! ```text
//!   OfEachLayer   (seed, name of the layer) ─▶ its values; other layers are not built
//!   OfModel       seed ─▶ layer 0 ─▶ layer 1 ─▶ …         those of other ranks are built, one at a time, and dropped
//! ```
//! Neither depends on how the model is cut. A tied variable is drawn once: from (seed, the variable's name), or by the first
//! of its layers.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use drumline_torch::{RngState, TorchError};
use tch::Tensor;
use tch::nn::{Path, VarStore};

use super::layer::{Layer, LayerError, LayerSpec, Tie, layer_failed};
use crate::error::ParallelError;

type Result<T> = std::result::Result<T, ParallelError>;

/// libtorch's generators belong to the process, and ranks may be threads of one.
static GENERATORS: Mutex<()> = Mutex::new(());

/// Where the first values of layers are drawn from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FirstValues {
    /// A generator for each layer, of this seed and the layer's name. A rank draws only what it keeps.
    OfEachLayer(u64),
    /// One generator for all layers, in their order: the values are those of a model that is not cut and is built after
    /// `tch::manual_seed`. A rank draws all layers and keeps its own.
    OfModel(u64),
}

impl Default for FirstValues {
    fn default() -> Self {
        Self::OfEachLayer(0)
    }
}

/// Draws from one generator until it is dropped.
pub(super) struct OneGenerator {
    before: RngState,
    _alone: MutexGuard<'static, ()>,
}

impl OneGenerator {
    fn begin(state: &RngState) -> std::result::Result<Self, TorchError> {
        let _alone = GENERATORS.lock().unwrap_or_else(PoisonError::into_inner);
        let before = RngState::capture()?;
        state.restore()?;
        Ok(Self { before, _alone })
    }
}

impl Drop for OneGenerator {
    fn drop(&mut self) {
        // The generators were set before, in the same way.
        let _ = self.before.restore();
    }
}

/// What all layers of a stage share while they are built.
pub(super) struct Shared<'a> {
    store: &'a VarStore,
    ties: &'a [Tie],
    first_values: FirstValues,
    /// Tied variables that a layer of another rank has drawn.
    drawn: RefCell<HashMap<String, Tensor>>,
}

impl<'a> Shared<'a> {
    pub(super) fn new(store: &'a VarStore, ties: &'a [Tie], first_values: FirstValues) -> Self {
        Self { store, ties, first_values, drawn: RefCell::default() }
    }

    /// The generator of all layers, if there is one for all.
    pub(super) fn generator(first_values: FirstValues) -> Result<Option<OneGenerator>> {
        match first_values {
            FirstValues::OfEachLayer(_) => Ok(None),
            FirstValues::OfModel(seed) => Ok(Some(OneGenerator::begin(&RngState::seeded(seed)?)?)),
        }
    }

    /// The same for another device of this rank.
    pub(super) fn on(&self, store: &'a VarStore) -> Self {
        Self { store, drawn: RefCell::new(copies(&self.drawn.borrow())), ..*self }
    }

    /// Builds a layer of this rank.
    pub(super) fn build(&self, spec: &LayerSpec) -> Result<Box<dyn Layer>> {
        let _generator = match self.first_values {
            FirstValues::OfEachLayer(seed) => {
                Some(OneGenerator::begin(&RngState::seeded(seed_of(seed, &spec.name))?)?)
            }
            FirstValues::OfModel(_) => None,
        };
        let built = (spec.build)(&LayerBuilder { shared: self, layer: &spec.name });
        built.map_err(|cause| layer_failed(&spec.name, &cause))
    }

    /// Draws the values of a layer of another rank, if those of the layers after it depend on them, and keeps the tied ones.
    pub(super) fn skip(&self, spec: &LayerSpec) -> Result<()> {
        if matches!(self.first_values, FirstValues::OfEachLayer(_)) {
            return Ok(());
        }
        let tied_in = |store: &VarStore| {
            let mut variables = store.variables();
            self.ties.iter().filter_map(move |tie| variables.remove_entry(&tie.variable))
        };
        // Those that layers before it have drawn.
        self.drawn.borrow_mut().extend(tied_in(self.store));
        let elsewhere = VarStore::new(self.store.device());
        self.on(&elsewhere).build(spec)?;
        self.drawn.borrow_mut().extend(tied_in(&elsewhere));
        Ok(())
    }
}

fn copies(tensors: &HashMap<String, Tensor>) -> HashMap<String, Tensor> {
    tensors.iter().map(|(name, tensor)| (name.clone(), tensor.shallow_clone())).collect()
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

    /// Whether first values come from a generator of this layer alone: what is drawn after other layers must be drawn now.
    pub fn draws_alone(&self) -> bool {
        matches!(self.shared.first_values, FirstValues::OfEachLayer(_))
    }

    /// A variable that this layer has in common with others ([`LayerList::tie`](super::LayerList::tie)). `create` makes it
    /// at a path, with a name, if no layer before it on this rank has done so.
    pub fn tied(
        &self,
        variable: &str,
        create: impl FnOnce(&Path<'_>, &str) -> std::result::Result<Tensor, LayerError>,
    ) -> std::result::Result<Tensor, LayerError> {
        let Shared { store, ties, first_values, drawn } = self.shared;
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
        if let Some(value) = drawn.borrow().get(variable) {
            return Ok(path.add(name, value.detach().copy(), value.requires_grad()));
        }
        let FirstValues::OfEachLayer(seed) = *first_values else { return create(&path, name) };
        let before = RngState::capture()?;
        RngState::seeded(seed_of(seed, variable))?.restore()?;
        let made = create(&path, name);
        before.restore()?;
        made
    }
}
