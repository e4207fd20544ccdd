//! The tensors of a checkpoint that was found but not read: each rank reads the parts that it holds, and nothing else.
//!
//! ```text
//!   files    fc.weight [8, 4]: shard-00001 rows 0 to 3, shard-00002 rows 4 to 7
//!   layout   this rank holds rows 3 to 5      ─▶ 16 bytes of the one file and 32 of the other
//! ```
//! Names and shapes are compared with those of the model before anything is read. Not here: which rank holds what
//! (`layout`), and checksums of whole files (`find`).

use std::path::{Path, PathBuf};

use drumline_comm::ProcessGroup;
use drumline_torch::{Named, OptimizerState};

use super::boxes::Boxes;
use super::error::CheckpointError;
use super::index::Index;
use super::layout::{StateLayout, parameter_of};
use super::load::{Loaded, unusable};
use super::manifest::Manifest;
use super::section::{Section, without_suffix};
use super::shard_reader::ShardReader;
use super::shards::agree;
use crate::launch::main_first::run_on_all;

/// Where the tensors are.
#[derive(Debug, Clone)]
pub(super) struct Unread {
    folder: PathBuf,
    model: Index,
    trained: Index,
    /// `None` if it is not to be read.
    optimizer: Option<Index>,
}

/// What a rank has read.
struct Parts {
    model: Vec<Named>,
    trained: Vec<Named>,
    optimizer: Option<Vec<Named>>,
    num_bytes: u64,
}

impl Loaded {
    /// Reads the tensors of a checkpoint that [`find_latest`](super::Checkpoints::find_latest) has found: the parts
    /// that this rank holds by `layout`, or whole tensors without one. All ranks call it. If the tensors are already
    /// there, it does nothing.
    ///
    /// If the checkpoint is of another model, nothing is read, and all ranks get an error with all differences.
    #[track_caller]
    pub fn read_parts(
        &mut self,
        layout: Option<&StateLayout>,
        group: &ProcessGroup,
    ) -> Result<(), CheckpointError> {
        let Some(unread) = &self.unread else { return Ok(()) };
        let read = run_on_all(group, "a checkpoint", || unread.read(layout))?;
        let Parts { model, trained, optimizer, num_bytes } = agree(group, read)?;
        self.state.model = model;
        self.state.trained = trained;
        if let Some(tensors) = optimizer {
            self.state.optimizer.tensors = tensors;
        }
        self.num_bytes_read += num_bytes;
        self.unread = None;
        Ok(())
    }

    /// Takes the optimizer's state out of a checkpoint whose tensors have not been read: it is read in parts.
    pub(crate) fn take_optimizer(&mut self) -> Result<Option<UnreadOptimizer>, CheckpointError> {
        let Some(unread) = &mut self.unread else { return Ok(None) };
        let Some(index) = unread.optimizer.take() else { return Ok(None) };
        let OptimizerState { kind, scalars, .. } = self.state.optimizer.clone();
        let head = OptimizerState { kind, scalars, tensors: Vec::new() };
        Ok(Some(UnreadOptimizer { head, reading: Reading::of(&unread.folder, &index)? }))
    }

    /// Replaces the optimizer's state. If it has not been read from the files yet, it never is.
    pub fn set_optimizer(&mut self, state: OptimizerState) {
        self.state.optimizer = state;
        if let Some(unread) = &mut self.unread {
            unread.optimizer = None;
        }
    }
}

impl Unread {
    /// Opens a checkpoint, and reads its generators.
    pub(super) fn open(folder: &Path, manifest: &Manifest) -> Result<(Self, Vec<Named>), CheckpointError> {
        let index =
            |section| manifest.index(folder, section).map_err(|reason| unusable(folder.to_owned(), reason));
        let unread = Self {
            folder: folder.to_owned(),
            model: index(Section::Model)?,
            trained: index(Section::Trained)?,
            optimizer: Some(index(Section::Optimizer)?),
        };
        let rng = Reading::of(folder, &index(Section::Rng)?)?.all(|_, shape| Some(Boxes::whole(shape)))?;
        Ok((unread, rng))
    }

    fn read(&self, layout: Option<&StateLayout>) -> Result<Parts, CheckpointError> {
        if let Some(layout) = layout {
            layout
                .check_names(self.model.tensors().map(|(name, entry)| (name.as_str(), &entry.shape[..])))?;
        }
        let of_model = |name: &str, shape: &[usize]| match layout {
            Some(layout) => layout.wanted_of_model(name, shape),
            None => Some(Boxes::whole(shape)),
        };
        let of_optimizer = |name: &str, shape: &[usize]| match layout {
            Some(layout) => layout.wanted_of_optimizer(name, shape),
            None => Some(Boxes::whole(shape)),
        };
        let [model, trained] = [&self.model, &self.trained].map(|index| Reading::of(&self.folder, index));
        let optimizer = self.optimizer.as_ref().map(|index| Reading::of(&self.folder, index)).transpose()?;
        let (model, trained) = (model?, trained?);
        let mut parts = Parts {
            model: model.all(of_model)?,
            trained: without_suffix(trained.all(of_model)?),
            optimizer: optimizer.as_ref().map(|reading| reading.all(of_optimizer)).transpose()?,
            num_bytes: 0,
        };
        let readings = [Some(&model), Some(&trained), optimizer.as_ref()];
        parts.num_bytes = readings.into_iter().flatten().map(|reading| reading.0.num_bytes_read()).sum();
        Ok(parts)
    }
}

/// The state of an optimizer that is not read at once.
pub(crate) struct UnreadOptimizer {
    /// Without tensors.
    head: OptimizerState,
    reading: Reading,
}

impl UnreadOptimizer {
    /// What this rank holds of the state of the parameters whose names are `wanted`.
    pub(crate) fn read(
        &self,
        layout: Option<&StateLayout>,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<OptimizerState, CheckpointError> {
        let boxes = |name: &str, shape: &[usize]| match layout {
            _ if !wanted(parameter_of(name)) => None,
            Some(layout) => layout.wanted_of_optimizer(name, shape),
            None => Some(Boxes::whole(shape)),
        };
        Ok(OptimizerState { tensors: self.reading.all(boxes)?, ..self.head.clone() })
    }
}

/// The reading of one section.
struct Reading(ShardReader);

impl Reading {
    fn of(folder: &Path, index: &Index) -> Result<Self, CheckpointError> {
        ShardReader::new(folder, index.clone()).map(Self)
    }

    /// The wanted boxes of each tensor that has some.
    fn all(&self, wanted: impl Fn(&str, &[usize]) -> Option<Boxes>) -> Result<Vec<Named>, CheckpointError> {
        let mut tensors = Vec::new();
        for name in self.0.names() {
            if let Some(boxes) = wanted(name, self.0.shape(name)?) {
                let tensor = boxes.joined(|region| self.0.read(name, region))?;
                tensors.push(Named { name: name.to_owned(), tensor });
            }
        }
        Ok(tensors)
    }
}
