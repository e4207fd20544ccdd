//! Where the weights are, for programs that load them themselves.

use std::path::{Path, PathBuf};

use super::Checkpoints;
use super::error::CheckpointError;
use super::folder::{self, BEST};
use super::load::{check, unusable};
use super::manifest::Manifest;
use super::section::Section;
use super::state::is_best_of;

impl Checkpoints {
    /// The file with the weights of the run's best checkpoint, or of the last one if none was evaluated. If each rank
    /// has written its own files, the checkpoint's folder, from which
    /// [`ShardReader::open_section`](super::ShardReader::open_section) reads them. Returns `None` if there is no
    /// checkpoint. Checksums were checked. Needs no group, and changes nothing on disk.
    pub fn model_file(&self) -> Result<Option<PathBuf>, CheckpointError> {
        let Some(last) = self.first(&self.candidates()?, check)? else { return Ok(None) };
        let last = self.dir.join(last.name.to_string());
        let best = folder::linked(&self.dir, BEST).map(|name| self.dir.join(name.to_string()));
        let of_last = read(&last)?;
        let Some(best) = best.filter(|best| *best != last) else {
            return Ok(Some(weights_of(last, &of_last)));
        };
        let of_best = read(&best)?;
        let score = of_best.score.map(|score| super::Score::from(score).value);
        if !is_best_of(score, of_best.best.map(|best| best.0), of_last.best.map(|best| best.0)) {
            return Ok(Some(weights_of(last, &of_last)));
        }
        check(&best).map_err(|reason| unusable(best.clone(), reason))?;
        Ok(Some(weights_of(best, &of_best)))
    }
}

fn read(checkpoint: &Path) -> Result<Manifest, CheckpointError> {
    Manifest::read(checkpoint).map_err(|reason| unusable(checkpoint.to_owned(), reason))
}

/// The file that has all weights, or the folder of a checkpoint in which several have.
fn weights_of(checkpoint: PathBuf, manifest: &Manifest) -> PathBuf {
    let (files, file) = (manifest.files_of(Section::Model), Section::Model.file());
    if files.keys().eq([&file]) { checkpoint.join(file) } else { checkpoint }
}
