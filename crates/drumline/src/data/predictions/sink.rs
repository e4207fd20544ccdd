//! Rank 0's side: writes the rows of all ranks to the file.

use std::io::{self, Write};
use std::path::{Path, PathBuf};

use drumline_files::{Durability, Replacement};

use super::merge::Merge;
use super::{PredictionFault, PredictionOptions, Share, cell};

/// Takes rows until all have arrived. If it is dropped before that, it leaves no file.
#[derive(Debug)]
pub(super) struct Sink {
    path: PathBuf,
    heading: String,
    merge: Merge,
    /// Open from the first round until the file gets its name.
    file: Option<Replacement>,
}

impl Sink {
    pub(super) fn new(path: &Path, options: &PredictionOptions) -> Self {
        Self {
            path: path.to_owned(),
            heading: cell::heading(options.format, &options.columns),
            merge: Merge::new(options.num_samples, options.max_waiting),
            file: None,
        }
    }

    /// Adds the rows of all ranks. Returns whether the file is complete.
    pub(super) fn take(&mut self, shares: Vec<Share>) -> Result<bool, PredictionFault> {
        let is_last = shares.iter().all(|share| share.is_last);
        for (rank, share) in shares.into_iter().enumerate() {
            share.fault.map_or(Ok(()), Err)?;
            share.rows.into_iter().try_for_each(|(index, line)| self.merge.add(rank, index, line))?;
        }
        if is_last {
            self.merge.check_complete()?;
        }
        self.write_ready().map_err(|cause| self.file_fault(&cause))?;
        self.merge.check_waiting()?;
        if is_last {
            self.keep().map_err(|cause| self.file_fault(&cause))?;
        }
        Ok(is_last)
    }

    fn write_ready(&mut self) -> io::Result<()> {
        if self.file.is_none() {
            let mut file = Replacement::new(&self.path)?;
            file.write_all(self.heading.as_bytes())?;
            self.file = Some(file);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        while let Some(line) = self.merge.pop() {
            file.write_all(line.as_bytes())?;
        }
        Ok(())
    }

    /// The bytes are on disk before the file gets its name, and both before any rank returns.
    fn keep(&mut self) -> io::Result<()> {
        self.file.take().map_or(Ok(()), |file| file.commit(Durability::Disk))
    }

    fn file_fault(&self, cause: &io::Error) -> PredictionFault {
        PredictionFault::File { path: self.path.display().to_string(), cause: cause.to_string() }
    }
}
