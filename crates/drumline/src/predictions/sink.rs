//! Rank 0's side: rows of all ranks to the file.

use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use super::merge::Merge;
use super::{PredictionFault, PredictionOptions, Share, cell};

/// Takes rows until all are there. Dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub(super) struct Sink {
    path: PathBuf,
    part: PathBuf,
    heading: String,
    merge: Merge,
    /// Open from the first round on, until the file is in its place.
    file: Option<BufWriter<File>>,
    is_begun: bool,
    is_complete: bool,
}

impl Sink {
    pub(super) fn new(path: &Path, options: &PredictionOptions) -> Self {
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        Self {
            path: path.to_owned(),
            part: part.into(),
            heading: cell::heading(options.format, &options.columns),
            merge: Merge::new(options.num_samples, options.max_waiting),
            file: None,
            is_begun: false,
            is_complete: false,
        }
    }

    /// Adds what the ranks brought; whether the file is complete.
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
            let mut file = BufWriter::new(File::create(&self.part)?);
            self.is_begun = true;
            file.write_all(self.heading.as_bytes())?;
            self.file = Some(file);
        }
        let Some(file) = &mut self.file else { return Ok(()) };
        while let Some(line) = self.merge.pop() {
            file.write_all(line.as_bytes())?;
        }
        Ok(())
    }

    /// The bytes reach the disk before the name does, and the name before anybody is told.
    fn keep(&mut self) -> io::Result<()> {
        if let Some(file) = self.file.take() {
            file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()?;
        }
        fs::rename(&self.part, &self.path)?;
        self.is_complete = true;
        let folder = self.path.parent().filter(|folder| !folder.as_os_str().is_empty());
        File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
    }

    fn file_fault(&self, cause: &io::Error) -> PredictionFault {
        PredictionFault::File { path: self.path.display().to_string(), cause: cause.to_string() }
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        if self.is_begun && !self.is_complete {
            // Not there any more, or not ours to remove: nothing to be done about either here.
            let _ = fs::remove_file(&self.part);
        }
    }
}
