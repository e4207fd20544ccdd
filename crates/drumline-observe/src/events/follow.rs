//! Reading `metrics.jsonl`: once, or as it grows.
//!
//! The file may be read at any moment: in the midst of a line, after a run has gone on (it was replaced by a shorter one)
//! or begun anew (it was moved away), or on a disk that has filled it with nonsense.
//!
//! ```text
//!   …}\n{"kind":"step", … }\n{"kind":"st
//!                           ▲ read up to here; the half line is read again when more of it is there
//! ```

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::{Event, EventsError};

/// Longer lines are nobody's; they are passed over, so that a broken file does not fill the memory.
const LONGEST_LINE: u64 = 4 << 20;

/// Bytes before the place that was read up to, by which a file that was written anew is known.
const KNOWN: usize = 64;

/// All events of a file.
pub fn read(path: &Path) -> Result<Vec<Event>, EventsError> {
    let failed = |source| EventsError::Read { path: path.to_owned(), source };
    File::open(path).map_err(failed)?;
    Ok(Follow::new(path).poll()?.events)
}

/// A reader of a file that grows.
///
/// ```
/// use drumline_observe::events::{Begin, Event, EventLog, Follow, StepEvent};
///
/// let folder = tempfile::tempdir()?;
/// let mut follow = Follow::new(&folder.path().join("metrics.jsonl"));
/// assert!(follow.poll()?.events.is_empty(), "a file that is not there yet is no error");
/// let mut log = EventLog::open(folder.path(), Begin::Anew)?;
/// log.write(&Event::Step(StepEvent { step: 1, ..Default::default() }))?;
/// assert_eq!(follow.poll()?.events.len(), 1);
/// assert_eq!(follow.poll()?.events.len(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Follow {
    path: PathBuf,
    place: Option<Place>,
}

/// What was added since the last look.
#[derive(Debug, Default, PartialEq)]
pub struct News {
    /// The file is another one than before: what was read of it counts no more, and `events` are from its beginning.
    pub begins_anew: bool,
    /// In the order of the file.
    pub events: Vec<Event>,
}

/// How far a file was read.
#[derive(Debug, Default)]
struct Place {
    /// Device and number of the file.
    file: (u64, u64),
    /// Behind the last whole line.
    offset: u64,
    /// The bytes before that.
    known: Vec<u8>,
    /// In a line that is too long.
    passes_over: bool,
}

impl Follow {
    /// Begins before the first line; the file need not be there.
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned(), place: None }
    }

    /// What was added since the last call.
    pub fn poll(&mut self) -> Result<News, EventsError> {
        let news = match File::open(&self.path) {
            // Not there yet, or a run that begins anew has just moved it away.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(News::default()),
            file => file.and_then(|file| self.news(&file)),
        };
        news.map_err(|source| EventsError::Read { path: self.path.clone(), source })
    }

    fn news(&mut self, file: &File) -> io::Result<News> {
        let before = self.place.take();
        let had_one = before.is_some();
        let same = match before {
            Some(place) if place.is_in(file)? => Some(place),
            _ => None,
        };
        let begins_anew = had_one && same.is_none();
        let mut place = match same {
            Some(place) => place,
            None => Place { file: number(file)?, ..Place::default() },
        };
        let events = place.read_on(file);
        self.place = Some(place);
        Ok(News { begins_anew, events: events? })
    }
}

fn number(file: &File) -> io::Result<(u64, u64)> {
    let data = file.metadata()?;
    Ok((data.dev(), data.ino()))
}

impl Place {
    /// Whether this is the file that was read, and what was read is still so.
    fn is_in(&self, file: &File) -> io::Result<bool> {
        if number(file)? != self.file {
            return Ok(false);
        }
        let mut now = vec![0; self.known.len()];
        match file.read_exact_at(&mut now, self.offset - self.known.len() as u64) {
            Ok(()) => Ok(now == self.known),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn read_on(&mut self, mut file: &File) -> io::Result<Vec<Event>> {
        file.seek(SeekFrom::Start(self.offset))?;
        let (mut reader, mut events, mut line) = (BufReader::new(file), Vec::new(), Vec::new());
        loop {
            line.clear();
            reader.by_ref().take(LONGEST_LINE).read_until(b'\n', &mut line)?;
            let is_whole = line.ends_with(b"\n");
            if !is_whole && (line.len() as u64) < LONGEST_LINE {
                return Ok(events);
            }
            if is_whole && !self.passes_over {
                events.extend(serde_json::from_slice::<Event>(&line).ok());
            }
            self.passes_over = !is_whole;
            self.move_past(&line);
        }
    }

    fn move_past(&mut self, bytes: &[u8]) {
        self.offset += bytes.len() as u64;
        self.known.extend_from_slice(&bytes[bytes.len().saturating_sub(KNOWN)..]);
        self.known.drain(..self.known.len().saturating_sub(KNOWN));
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Begin, EventLog, METRICS, StepEvent};
    use super::*;
    use std::fs::{self, OpenOptions};
    use std::io::Write;

    struct Watched {
        folder: tempfile::TempDir,
        follow: Follow,
    }

    impl Watched {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            let follow = Follow::new(&folder.path().join(METRICS));
            Self { folder, follow }
        }

        fn path(&self) -> PathBuf {
            self.folder.path().join(METRICS)
        }

        fn add(&self, text: &str) {
            let mut options = OpenOptions::new();
            options.create(true).append(true).open(self.path()).unwrap().write_all(text.as_bytes()).unwrap();
        }

        /// Whether it began anew, and the steps that were seen.
        fn sees(&mut self) -> (bool, Vec<u64>) {
            let news = self.follow.poll().unwrap();
            let step = |event: &Event| match event {
                Event::Step(step) => step.step,
                other => panic!("{other:?}"),
            };
            (news.begins_anew, news.events.iter().map(step).collect())
        }
    }

    fn line(step: u64) -> String {
        format!("{{\"kind\":\"step\",\"step\":{step}}}\n")
    }

    #[test]
    fn half_lines_wait_for_their_other_half() {
        let mut file = Watched::new();
        assert_eq!(file.sees(), (false, vec![]));
        let second = line(2);
        let (half, rest) = second.split_at(9);
        file.add(&(line(1) + half));
        assert_eq!(file.sees(), (false, vec![1]));
        assert_eq!(file.sees(), (false, vec![]));
        file.add(rest);
        file.add(&line(3));
        assert_eq!(file.sees(), (false, vec![2, 3]));
    }

    #[test]
    fn broken_lines_and_unknown_kinds_are_left_out() {
        let mut file = Watched::new();
        file.add(&format!("{}\u{0}\u{0}\n\n{{\"kind\":\"party\"}}\n[]\n{}", line(1), line(2)));
        assert_eq!(file.sees(), (false, vec![1, 2]));
    }

    #[test]
    fn a_file_that_is_replaced_or_cut_is_read_from_its_beginning() {
        let mut file = Watched::new();
        file.add(&(line(1) + &line(2) + &line(3)));
        assert_eq!(file.sees().1, [1, 2, 3]);
        let mut log = EventLog::open(file.folder.path(), Begin::After { step: 1 }).unwrap();
        assert_eq!(file.sees(), (true, vec![1]), "a run that goes on");
        log.write(&Event::Step(StepEvent { step: 2, ..StepEvent::default() })).unwrap();
        assert_eq!(file.sees(), (false, vec![2]), "control: more of the same file");
        OpenOptions::new().write(true).open(file.path()).unwrap().set_len(0).unwrap();
        assert_eq!(file.sees(), (true, vec![]), "cut to nothing");
        file.add(&line(7));
        assert_eq!(file.sees(), (false, vec![7]));
        fs::write(file.path(), line(8) + &line(9)).unwrap();
        assert_eq!(file.sees(), (true, vec![8, 9]), "written over by a longer one");
        drop(EventLog::open(file.folder.path(), Begin::Anew).unwrap());
        assert_eq!(file.sees(), (true, vec![]), "moved away");
    }

    #[test]
    fn a_file_that_vanishes_keeps_its_place_until_there_is_another() {
        let mut file = Watched::new();
        file.add(&line(1));
        assert_eq!(file.sees().1, [1]);
        fs::rename(file.path(), file.folder.path().join("aside")).unwrap();
        assert_eq!(file.sees(), (false, vec![]));
        file.add(&line(5));
        assert_eq!(file.sees(), (true, vec![5]));
    }

    #[test]
    fn a_line_without_end_is_passed_over() {
        let mut file = Watched::new();
        file.add(&"x".repeat(LONGEST_LINE as usize + 10));
        assert_eq!(file.sees(), (false, vec![]));
        file.add(&format!("{}{}", line(1), line(2)));
        assert_eq!(file.sees(), (false, vec![2]));
    }

    #[test]
    fn no_file_is_named() {
        let said = read(Path::new("/no/such/metrics.jsonl")).unwrap_err().to_string();
        assert!(said.contains("/no/such/metrics.jsonl"), "{said}");
    }
}
