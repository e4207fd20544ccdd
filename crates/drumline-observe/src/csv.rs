//! CSV files as DeepSpeed's `csv_monitor` lays them out: a file for each figure, a line for each time it was logged.
//!
//! ```text
//!   FOLDER/Train_Samples_lr.csv      step,lr
//!                                    8,0.001
//!                                    16,0.0009
//! ```
//! The name of a file is that of its figure, `Train/Samples/lr`; the second column has the last part of it.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use drumline_files::{Durability, replace};

/// The files cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}; try another folder for CSV files", path.display())]
pub struct CsvError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

type Result<T = ()> = std::result::Result<T, CsvError>;

/// CSV files that grow.
///
/// ```
/// use drumline_observe::csv::Writer;
///
/// let folder = tempfile::tempdir()?;
/// let mut writer = Writer::create(folder.path())?;
/// writer.scalars(8, &[("Train/Samples/lr", 0.5)])?;
/// let text = std::fs::read_to_string(folder.path().join("Train_Samples_lr.csv"))?;
/// assert_eq!(text, "step,lr\n8,0.5\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Writer {
    folder: PathBuf,
    files: BTreeMap<String, File>,
    /// The last step whose lines stay; `None` if all do.
    last_kept: Option<u64>,
}

impl Writer {
    /// Writes in this folder, which is created if necessary. Files that are there already are continued.
    pub fn create(folder: impl Into<PathBuf>) -> Result<Self> {
        let folder = folder.into();
        fs::create_dir_all(&folder).map_err(|source| CsvError { path: folder.clone(), source })?;
        Ok(Self { folder, files: BTreeMap::new(), last_kept: None })
    }

    /// Continues files without the lines after `step`, which the run repeats.
    pub fn resume_after(&mut self, step: u64) {
        self.last_kept = Some(step);
    }

    /// Appends a line to the file of each figure.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result {
        for (name, value) in values {
            let path = self.folder.join(file_name(name));
            let written =
                self.file(name, &path).and_then(|file| file.write_all(line(step, *value).as_bytes()));
            written.map_err(|source| CsvError { path, source })?;
        }
        Ok(())
    }

    /// The file of a figure, opened and with its header.
    fn file(&mut self, name: &str, path: &Path) -> io::Result<&mut File> {
        if !self.files.contains_key(name) {
            if let Some(step) = self.last_kept {
                keep_until(path, step)?;
            }
            let mut file = OpenOptions::new().create(true).append(true).open(path)?;
            if file.metadata()?.len() == 0 {
                let column = name.rsplit('/').next().unwrap_or(name);
                file.write_all(format!("step,{}\n", quoted(column)).as_bytes())?;
            }
            self.files.insert(name.to_owned(), file);
        }
        self.files.get_mut(name).ok_or_else(|| io::Error::other("the file was just opened"))
    }
}

fn file_name(name: &str) -> String {
    format!("{}.csv", name.replace(['/', ' '], "_"))
}

fn line(step: u64, value: f64) -> String {
    format!("{step},{value}\n")
}

/// A field; in quotes if it has a comma, a quote or a line break.
fn quoted(field: &str) -> String {
    if field.contains([',', '"', '\n', '\r']) {
        return format!("\"{}\"", field.replace('"', "\"\""));
    }
    field.to_owned()
}

/// Removes the lines after a step from a file, if it is there.
fn keep_until(path: &Path, step: u64) -> io::Result<()> {
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    let is_kept = |line: &&str| {
        let number = line.split(',').next().unwrap_or_default().parse::<u64>();
        line.ends_with('\n') && number.map_or(true, |number| number <= step)
    };
    let kept: String = text.split_inclusive('\n').filter(is_kept).collect();
    if kept == text { Ok(()) } else { replace(path, &kept, Durability::Process) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(folder: &Path, name: &str) -> String {
        fs::read_to_string(folder.join(name)).unwrap()
    }

    #[test]
    fn a_figure_has_a_file_with_a_header() {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("out/job");
        let mut writer = Writer::create(&place).unwrap();
        writer.scalars(8, &[("Train/Samples/lr", 1e-5), ("my loss", 2.5)]).unwrap();
        writer.scalars(16, &[("Train/Samples/lr", 0.0)]).unwrap();
        assert_eq!(read(&place, "Train_Samples_lr.csv"), "step,lr\n8,0.00001\n16,0\n");
        assert_eq!(read(&place, "my_loss.csv"), "step,my loss\n8,2.5\n");
        let mut another = Writer::create(&place).unwrap();
        another.scalars(8, &[("my loss", 3.0)]).unwrap();
        assert_eq!(read(&place, "my_loss.csv"), "step,my loss\n8,2.5\n8,3\n", "it is continued");
    }

    #[test]
    fn a_resumed_run_repeats_no_line() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path()).unwrap();
        (1..5u32).for_each(|step| writer.scalars(step.into(), &[("x", f64::from(step))]).unwrap());
        let path = folder.path().join("x.csv");
        fs::write(&path, fs::read_to_string(&path).unwrap() + "5,").unwrap();
        let mut resumed = Writer::create(folder.path()).unwrap();
        resumed.resume_after(2);
        resumed.scalars(3, &[("x", 9.0), ("new", 1.0)]).unwrap();
        assert_eq!(read(folder.path(), "x.csv"), "step,x\n1,1\n2,2\n3,9\n");
        assert_eq!(read(folder.path(), "new.csv"), "step,new\n3,1\n");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let error = Writer::create(file.join("below")).unwrap_err().to_string();
        assert!(error.contains("file/below") && error.contains("; try another folder"), "{error}");
    }
}
