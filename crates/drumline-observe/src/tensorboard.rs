//! Event files that TensorBoard opens: scalars, histograms, text.
//!
//! ```text
//!   Writer ──▶ Event (protobuf, message.rs) ──▶ record: length, check, bytes, check (record.rs)
//!     ──▶ OUT_DIR/tensorboard/events.out.tfevents.…
//! ```
//! Each record is written at once and as a whole, so a TensorBoard that follows the file is never further behind, and a crash
//! loses nothing. A resumed run begins another file in the same folder; TensorBoard shows them as one, without the steps that
//! are repeated.

mod histogram;
mod message;
mod record;

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use message::{Event, Metadata, PluginData, Session, Shape, Size, Summary, Tensor, Value};

/// Name of the folder in `OUT_DIR`.
pub const TENSORBOARD: &str = "tensorboard";

/// The content of the first record: the version of the format.
const VERSION: &str = "brain.Event:2";

/// TensorFlow's number for the start of a program.
const SESSION_START: i32 = 1;

/// TensorFlow's number for strings.
const STRING: i32 = 7;

/// The folder cannot be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write {}: {source}; try another folder for TensorBoard", path.display())]
pub struct TensorboardError {
    path: PathBuf,
    #[source]
    source: io::Error,
}

type Result<T = ()> = std::result::Result<T, TensorboardError>;

/// An event file that grows.
///
/// ```
/// use drumline_observe::tensorboard::Writer;
///
/// let folder = tempfile::tempdir()?;
/// let mut writer = Writer::create(folder.path())?;
/// writer.text("config", 0, "| key | value |\n|---|---|\n| LR | 0.1 |")?; // Markdown
/// writer.scalar("train/loss", 1, 2.3)?;
/// writer.scalars(2, &[("train/loss", 2.1), ("lr", 0.1)])?; // at the cost of one
/// writer.histogram("grad/fc.weight", 2, &[0.1, -0.2, 0.05])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Writer {
    path: PathBuf,
    file: File,
}

impl Writer {
    /// Begins a file in `folder`, which is created if it does not exist.
    pub fn create(folder: &Path) -> Result<Self> {
        let path = folder.join(file_name());
        let opened = fs::create_dir_all(folder)
            .and_then(|()| OpenOptions::new().create_new(true).append(true).open(&path));
        let file = opened.map_err(|source| TensorboardError { path: path.clone(), source })?;
        let mut writer = Self { path, file };
        writer.write(Event { file_version: Some(VERSION.into()), ..Event::default() })?;
        Ok(writer)
    }

    /// The run resumes after this many steps: later steps that were written before, and not saved in a checkpoint, no longer count.
    pub fn resume_after(&mut self, step: u64) -> Result {
        let session = Some(Session { status: SESSION_START });
        self.write(Event { step: step as i64 + 1, session, ..Event::default() })
    }

    /// A number at a step. NaN and infinities are shown as such.
    pub fn scalar(&mut self, tag: &str, step: u64, value: f64) -> Result {
        self.scalars(step, &[(tag, value)])
    }

    /// Several numbers of one step.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result {
        let value = |(tag, value): &(&str, f64)| Value {
            tag: (*tag).to_owned(),
            simple_value: Some(*value as f32),
            ..Value::default()
        };
        self.summary(step, values.iter().map(value).collect())
    }

    /// The distribution of values, such as those of a gradient. NaN and infinities are left out; without any values, nothing is
    /// written.
    pub fn histogram(&mut self, tag: &str, step: u64, values: &[f32]) -> Result {
        let Some(histogram) = histogram::of(values) else { return Ok(()) };
        self.summary(
            step,
            vec![Value { tag: tag.to_owned(), histogram: Some(histogram), ..Value::default() }],
        )
    }

    /// A text in Markdown.
    pub fn text(&mut self, tag: &str, step: u64, text: &str) -> Result {
        let plugin = PluginData { plugin_name: "text".into(), content: Vec::new() };
        let tensor = Tensor {
            dtype: STRING,
            shape: Some(Shape { sizes: vec![Size { size: 1 }] }),
            strings: vec![text.as_bytes().to_vec()],
        };
        self.summary(
            step,
            vec![Value {
                tag: tag.to_owned(),
                tensor: Some(tensor),
                metadata: Some(Metadata { plugin_data: Some(plugin) }),
                ..Value::default()
            }],
        )
    }

    /// Waits until everything is on the disk. Other programs see each record at once, even without this.
    pub fn flush(&mut self) -> Result {
        let flushed = self.file.sync_data();
        flushed.map_err(|source| TensorboardError { path: self.path.clone(), source })
    }

    fn summary(&mut self, step: u64, values: Vec<Value>) -> Result {
        self.write(Event { step: step as i64, summary: Some(Summary { values }), ..Event::default() })
    }

    fn write(&mut self, event: Event) -> Result {
        let record = record::of(&Event { wall_time: now(), ..event });
        self.file.write_all(&record).map_err(|source| TensorboardError { path: self.path.clone(), source })
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |now| now.as_secs_f64())
}

/// The name of a new file. TensorBoard reads the files of a folder in the order of their names, so the time comes first.
fn file_name() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let (seconds, count) = (now() as u64, COUNT.fetch_add(1, Ordering::Relaxed));
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("events.out.tfevents.{seconds:010}.{host}.{}.{count}", std::process::id())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_in_the_file_as_soon_as_it_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(folder.path()).unwrap();
        let len = |writer: &Writer| fs::metadata(&writer.path).unwrap().len();
        let before = len(&writer);
        writer.scalar("loss", 1, 0.5).unwrap();
        assert!(before > 16 && len(&writer) > before + 16);
        let with_one = len(&writer);
        writer.histogram("nothing", 1, &[f32::NAN, f32::INFINITY]).unwrap();
        assert_eq!(len(&writer), with_one);
        writer.flush().unwrap();
    }

    #[test]
    fn two_writers_in_one_folder_have_files_of_their_own() {
        let folder = tempfile::tempdir().unwrap();
        let writers = [Writer::create(folder.path()).unwrap(), Writer::create(folder.path()).unwrap()];
        assert_ne!(writers[0].path, writers[1].path);
        let names: Vec<_> =
            writers.iter().map(|writer| writer.path.file_name().unwrap().to_owned()).collect();
        assert!(names.iter().all(|name| name.to_string_lossy().contains("tfevents")));
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_named() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let error = Writer::create(file.path()).unwrap_err().to_string();
        assert!(error.contains("tfevents") && error.contains("try another folder"), "{error}");
    }
}
