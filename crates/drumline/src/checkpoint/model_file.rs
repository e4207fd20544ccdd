//! The weights alone, for programs that have their own way to load them.

use std::path::PathBuf;

use super::Checkpoints;
use super::error::CheckpointError;
use super::folder::{self, BEST};
use super::load::{MODEL, check, unusable};
use super::manifest::Manifest;
use super::state::is_best_of;

impl Checkpoints {
    /// The file with the weights of the run's best checkpoint, or of its last one where it has evaluated none; `None` if there is no
    /// checkpoint. Its bytes were compared with what was written. Needs no group, and changes nothing on disk.
    pub fn model_file(&self) -> Result<Option<PathBuf>, CheckpointError> {
        let Some(last) = self.first(&self.candidates()?, check)? else { return Ok(None) };
        let last = self.dir.join(last.name.to_string());
        let read = |path: &PathBuf| Manifest::read(path).map_err(|reason| unusable(path.clone(), reason));
        let best = folder::linked(&self.dir, BEST).map(|name| self.dir.join(name.to_string()));
        let Some(best) = best.filter(|best| *best != last) else { return Ok(Some(last.join(MODEL))) };
        let (of_best, of_last) = (read(&best)?, read(&last)?);
        let score = of_best.score.map(|score| super::Score::from(score).value);
        if !is_best_of((score, of_best.best.map(|best| best.0)), of_last.best.map(|best| best.0)) {
            return Ok(Some(last.join(MODEL)));
        }
        check(&best).map_err(|reason| unusable(best.clone(), reason))?;
        Ok(Some(best.join(MODEL)))
    }
}
