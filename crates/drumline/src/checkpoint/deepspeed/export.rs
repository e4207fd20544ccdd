//! Writing what was read: the weights as one file, or everything as a checkpoint from which a run resumes.

use std::collections::BTreeMap;
use std::path::Path;

use drumline_torch::RngState;

use super::super::Checkpoints;
use super::super::error::CheckpointError;
use super::super::safetensors::{Made, SafetensorsError, replace_made};
use super::super::save::{Import, Saved};
use super::super::section::Section;
use super::super::state::RunState;
use super::super::tag;
use super::error::DeepSpeedError;
use super::folder::Folder;
use super::states::{Opened, States, read};
use super::stretches::{MappedFiles, Planned};

type Result<T = ()> = std::result::Result<T, DeepSpeedError>;

/// A checkpoint that DeepSpeed wrote.
///
/// ```no_run
/// use drumline::checkpoint::deepspeed::DeepSpeedCheckpoint;
///
/// let checkpoint = DeepSpeedCheckpoint::open("out".as_ref(), None)?;
/// println!("stage {}, {} ranks: {:?}", checkpoint.stage(), checkpoint.num_ranks(), checkpoint.names());
/// checkpoint.export("model.safetensors".as_ref())?;
/// # Ok::<(), drumline::checkpoint::deepspeed::DeepSpeedError>(())
/// ```
pub struct DeepSpeedCheckpoint {
    opened: Opened,
    states: States,
}

impl DeepSpeedCheckpoint {
    /// Opens the checkpoint of a tag in the folder that was given to `save_checkpoint`; by default that of `latest`.
    /// Nothing that the files name is run.
    pub fn open(dir: &Path, tag: Option<&str>) -> Result<Self> {
        let opened = Opened::new(Folder::find(dir, tag)?)?;
        let states = read(&opened)?;
        Ok(Self { opened, states })
    }

    /// The stage of ZeRO that saved it.
    pub fn stage(&self) -> u64 {
        self.states.stage
    }

    /// How many ranks saved it.
    pub fn num_ranks(&self) -> usize {
        self.states.num_ranks
    }

    /// Its tag.
    pub fn tag(&self) -> &str {
        &self.opened.folder.tag
    }

    /// The names of the model's tensors: buffers, frozen parameters, trained parameters, second names of tied ones.
    pub fn names(&self) -> Vec<&str> {
        self.tensors().map(|tensor| tensor.name.as_str()).collect()
    }

    fn tensors(&self) -> impl Iterator<Item = &Planned> {
        self.states.model.iter().chain(&self.states.tied)
    }

    /// Writes the model's tensors to a safetensors file, which replaces one at this path when it is complete. Numbers
    /// are in f32; of trained parameters these are the master copies. Checksums are checked before.
    pub fn export(&self, file: &Path) -> Result {
        self.opened.check()?;
        let mapped = self.mapped()?;
        let written = replace_made(file, made(self.tensors(), &mapped));
        Ok(written.map_err(CheckpointError::of_file(file))?)
    }

    /// Writes the model's tensors, the moments of Adam or AdamW and the number of steps as a checkpoint of ours, from
    /// which a run resumes: `DIR/TAG/step-…`, and `DIR/latest` as DeepSpeed has it. Tied parameters have one name in it,
    /// as in a `VarStore`.
    pub fn import(&self, dir: &Path) -> Result<Saved> {
        let moments = match &self.states.moments {
            Ok(moments) => moments,
            Err(error) => {
                return Err(DeepSpeedError::Unsupported {
                    path: self.opened.folder.path.clone(),
                    what: format!("its optimizer's state is not that of Adam or AdamW: {error}"),
                    advice: "the weights alone, without --optimizer",
                });
            }
        };
        self.opened.check()?;
        let mapped = self.mapped()?;
        let States { global_steps, skipped_steps, .. } = self.states;
        let rng = RngState::capture().map_err(CheckpointError::from)?;
        let state = RunState {
            step: global_steps.saturating_sub(skipped_steps),
            optimizer: moments.state.clone(),
            ..RunState::without_tensors(rng)
        };
        let sections = vec![
            Import { section: Section::Model, made: made(self.states.model.iter(), &mapped) },
            Import { section: Section::Optimizer, made: made(moments.tensors.iter(), &mapped) },
        ];
        let tag = tag::checked(self.tag())?;
        let saved = Checkpoints::new(dir.join(tag)).import(&state, sections)?;
        tag::set_latest(dir, tag).map_err(CheckpointError::write(&dir.join(tag::LATEST)))?;
        Ok(saved)
    }

    fn mapped(&self) -> Result<MappedFiles> {
        Ok(MappedFiles::open(&self.opened.paths()).map_err(CheckpointError::from)?)
    }
}

/// Tensors that are put together while they are written.
fn made<'a>(tensors: impl Iterator<Item = &'a Planned>, mapped: &'a MappedFiles) -> Made<'a> {
    let by_name: BTreeMap<_, _> = tensors.map(|tensor| (tensor.name.as_str(), tensor)).collect();
    let entries = by_name.values().map(|tensor| tensor.entry()).collect();
    let make = move |name: &str| mapped.make(by_name[name]).map_err(SafetensorsError::Memory);
    Made { entries, make: Box::new(make) }
}

impl std::fmt::Debug for DeepSpeedCheckpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DeepSpeedCheckpoint")
            .field("folder", &self.opened.folder)
            .field("stage", &self.states.stage)
            .field("num_ranks", &self.states.num_ranks)
            .finish_non_exhaustive()
    }
}
