//! Checkpoints by tags, in folders as DeepSpeed lays them out, with Drumline's files in them.
//!
//! ```text
//!   DIR/latest                          the tag of the last save, as text
//!   DIR/global_step100/step-00000100/   a checkpoint of any number of ranks; see `checkpoint`
//! ```
//! `latest` is written when the files of the tag are safe on disk.

use std::path::{Path, PathBuf};

use drumline_comm::ProcessGroup;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::Result;
use super::engine::DeepSpeedEngine;
use crate::checkpoint::{CheckpointError, tag};
use crate::comm::shared_failure::{LocalFailure, SharedFailure, agree};
use crate::config::deepspeed::TagValidation;
use crate::run_error::RunError;

/// What the engine saves beside the accelerator's state.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Saved {
    micro_steps: u64,
    client_state: Value,
}

/// A checkpoint that was loaded.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LoadedCheckpoint {
    /// Its folder, as rank 0 sees it.
    pub path: PathBuf,
    /// Its tag.
    pub tag: String,
    /// The epoch to continue, if a loader is prepared. The loader knows the position in it.
    pub epoch: u64,
    /// What was given to `save_checkpoint`.
    pub client_state: Value,
}

impl<M: 'static> DeepSpeedEngine<M> {
    /// Saves the state of the training under a tag in `dir`; by default under `global_stepN`. All ranks call it, between
    /// two steps. `client_state` is returned when the checkpoint is loaded. Returns the checkpoint's folder.
    #[track_caller]
    pub fn save_checkpoint(
        &self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
        client_state: &Value,
    ) -> Result<PathBuf> {
        let (dir, group) = (dir.as_ref(), self.accelerator().group());
        let tag = tag.map_or_else(|| format!("global_step{}", self.global_steps()), str::to_owned);
        let tag = common_tag(group, &tag, self.plan().checkpoint.tag_validation)?;
        let saved = Saved { micro_steps: self.micro_steps(), client_state: client_state.clone() };
        let saved = agree::<_, RunError>(group, serde_json::to_value(saved).map_err(LocalFailure::from))?;
        let path = self.accelerator().save_with(&dir.join(&tag), saved)?;
        let announced = match group.rank() {
            0 => tag::set_latest(dir, &tag).map_err(CheckpointError::write(&dir.join(tag::LATEST))),
            _ => Ok(()),
        };
        agree::<_, RunError>(group, announced.map_err(LocalFailure::from))?;
        Ok(path)
    }

    /// Loads the checkpoint of a tag in `dir`; by default that of `latest`. Any number of ranks loads what any other
    /// saved. All ranks call it, before the first step or between two. Without `latest` nothing is loaded, as in
    /// DeepSpeed: rank 0 logs a warning, and `None` is returned.
    #[track_caller]
    pub fn load_checkpoint(
        &mut self,
        dir: impl AsRef<Path>,
        tag: Option<&str>,
    ) -> Result<Option<LoadedCheckpoint>> {
        let (dir, group) = (dir.as_ref(), self.accelerator().group().clone());
        let open = (self.has_begun() || self.accelerator().is_within_window()).then_some(
            "load_checkpoint within a step would mix its gradients with others; try it after step()",
        );
        agree::<_, RunError>(&group, open.map_or(Ok(()), |open| Err(open.into())))?;
        let Some(tag) = tag_to_load(&group, dir, tag)? else {
            self.accelerator().on_main_process(|| {
                tracing::warn!("there is no {}: nothing is loaded", dir.join(tag::LATEST).display());
            });
            return Ok(None);
        };
        let Some((resumed, saved)) = self.accelerator().load_with(&dir.join(&tag))? else {
            let path = dir.join(&tag);
            let text = format!("no checkpoint in {}; try a tag that was saved there", path.display());
            return Err(SharedFailure::on_all_ranks(text).into());
        };
        // A checkpoint that was converted has no state of the engine.
        let saved = if saved.is_null() { Ok(Saved::default()) } else { serde_json::from_value(saved) };
        let saved: Saved = agree::<_, RunError>(&group, saved.map_err(LocalFailure::from))?;
        self.set_micro_steps(saved.micro_steps);
        let client_state = saved.client_state;
        Ok(Some(LoadedCheckpoint { path: resumed.path, tag, epoch: resumed.epoch, client_state }))
    }
}

/// The tag under which all ranks save: that of rank 0, if others do not have the same.
fn common_tag(group: &ProcessGroup, tag: &str, validation: TagValidation) -> Result<String> {
    let valid = tag::checked(tag).map(drop).map_err(LocalFailure::from);
    agree::<_, RunError>(group, valid)?;
    let tags = group.all_gather_object(&tag.to_owned())?;
    if let Some(rank) = tags.iter().position(|other| *other != tags[0]) {
        let text =
            format!("rank {rank} saves under the tag `{}`, and rank 0 under `{}`", tags[rank], tags[0]);
        match validation {
            TagValidation::Fail => {
                let text = format!("{text}; try the same tag on all ranks");
                return Err(SharedFailure::on_all_ranks(text).into());
            }
            TagValidation::Warn if group.rank() == 0 => tracing::warn!("{text}, which is used"),
            TagValidation::Warn | TagValidation::Ignore => (),
        }
    }
    Ok(tags[0].clone())
}

/// The tag to load, the same on all ranks; `None` if there is no `latest`.
fn tag_to_load(group: &ProcessGroup, dir: &Path, tag: Option<&str>) -> Result<Option<String>> {
    let found = match tag {
        Some(tag) => Ok(Some(tag.to_owned())),
        None if group.rank() == 0 => {
            let latest = tag::latest(dir);
            latest
                .map_err(|error| LocalFailure::from(format!("{}: {error}", dir.join(tag::LATEST).display())))
        }
        None => Ok(None),
    };
    let found = found.and_then(|found| {
        found.as_deref().map_or(Ok(()), |tag| tag::checked(tag).map(drop))?;
        Ok(found)
    });
    let found = agree::<_, RunError>(group, found)?;
    Ok(group.broadcast_object(Some(&found).filter(|_| group.rank() == 0), 0)?)
}
