//! Reads `metrics.jsonl`: once, or as it grows. How a file is read that changes meanwhile is in [`tail`](crate::tail).

use std::io;
use std::path::Path;

use super::{Event, EventsError};
use crate::tail::{Begin, Tail, TailItem};

/// All events of a file.
pub fn read(path: &Path) -> Result<Vec<Event>, EventsError> {
    std::fs::metadata(path).map_err(|source| EventsError::Read { path: path.to_owned(), source })?;
    Ok(Follow::new(path).poll()?.events)
}

/// A reader of a file that grows.
///
/// ```
/// use drumline_observe::events::{Begin, Event, EventLog, Follow, StepEvent};
///
/// let folder = tempfile::tempdir()?;
/// let mut follow = Follow::new(&folder.path().join("metrics.jsonl"));
/// assert!(follow.poll()?.events.is_empty(), "a file that does not exist yet is no error");
/// let mut log = EventLog::open(folder.path(), Begin::New)?;
/// log.write(&Event::Step(StepEvent { step: 1, ..Default::default() }))?;
/// assert_eq!(follow.poll()?.events.len(), 1);
/// assert_eq!(follow.poll()?.events.len(), 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Follow {
    tail: Tail,
}

/// What was added since the last poll.
#[derive(Debug, Default, PartialEq)]
pub struct News {
    /// The file was replaced: what was read before no longer counts, and `events` are from its beginning.
    pub is_replaced: bool,
    /// The new events, in the order of the file.
    pub events: Vec<Event>,
}

impl Follow {
    /// Begins at the first line; the file need not exist yet.
    pub fn new(path: &Path) -> Self {
        Self { tail: Tail::new(path.to_owned(), Begin::AtStart) }
    }

    /// What was added since the last call.
    pub fn poll(&mut self) -> Result<News, EventsError> {
        let mut news = News::default();
        let read = self.read_new(u64::MAX, |item| match item {
            TailItem::StartOver => news.is_replaced = true,
            TailItem::Line(event) => news.events.push(event),
        });
        read.map_err(|source| EventsError::Read { path: self.tail.path().to_owned(), source })?;
        Ok(news)
    }

    /// How far the file was read; `None` before it was found.
    pub(crate) fn offset(&self) -> Option<u64> {
        self.tail.offset()
    }

    /// Reads all events to the end of the file, one part at a time, as long as `wants_more`.
    pub(crate) fn read_all(
        &mut self,
        mut wants_more: impl FnMut() -> bool,
        mut on_event: impl FnMut(Event),
    ) -> io::Result<()> {
        const PART: u64 = 1 << 20;
        let mut place = None;
        while wants_more() {
            self.read_new(PART, |item| match item {
                TailItem::StartOver => {}
                TailItem::Line(event) => on_event(event),
            })?;
            let now = self.offset();
            if now == std::mem::replace(&mut place, now) {
                break;
            }
        }
        Ok(())
    }

    /// As [`poll`](Self::poll), one event after the other, from about `most` bytes at a time.
    pub(crate) fn read_new(&mut self, most: u64, mut on_item: impl FnMut(TailItem<Event>)) -> io::Result<()> {
        self.tail.poll(most, |item| match item {
            TailItem::StartOver => on_item(TailItem::StartOver),
            TailItem::Line(line) => {
                if let Ok(event) = serde_json::from_slice(line) {
                    on_item(TailItem::Line(event));
                }
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Begin, EventLog, METRICS, StepEvent};
    use super::*;
    use crate::tail::LONGEST_LINE;
    use std::fs::{self, OpenOptions};
    use std::io::Write;
    use std::path::PathBuf;

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

        /// Whether the file was replaced, and the steps that were read.
        fn sees(&mut self) -> (bool, Vec<u64>) {
            let news = self.follow.poll().unwrap();
            let step = |event: &Event| match event {
                Event::Step(step) => step.step,
                other => panic!("{other:?}"),
            };
            (news.is_replaced, news.events.iter().map(step).collect())
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
    fn broken_lines_and_unknown_kinds_are_skipped() {
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
        assert_eq!(file.sees(), (true, vec![1]), "a run that resumes");
        log.write(&Event::Step(StepEvent { step: 2, ..StepEvent::default() })).unwrap();
        assert_eq!(file.sees(), (false, vec![2]), "control: more of the same file");
        OpenOptions::new().write(true).open(file.path()).unwrap().set_len(0).unwrap();
        assert_eq!(file.sees(), (true, vec![]), "cut to nothing");
        file.add(&line(7));
        assert_eq!(file.sees(), (false, vec![7]));
        fs::write(file.path(), line(8) + &line(9)).unwrap();
        assert_eq!(file.sees(), (true, vec![8, 9]), "overwritten by a longer one");
        drop(EventLog::open(file.folder.path(), Begin::New).unwrap());
        assert_eq!(file.sees(), (true, vec![]), "moved away");
    }

    #[test]
    fn a_file_that_vanishes_keeps_its_position_until_there_is_another() {
        let mut file = Watched::new();
        file.add(&line(1));
        assert_eq!(file.sees().1, [1]);
        fs::rename(file.path(), file.folder.path().join("aside")).unwrap();
        assert_eq!(file.sees(), (false, vec![]));
        file.add(&line(5));
        assert_eq!(file.sees(), (true, vec![5]));
    }

    #[test]
    fn an_endless_line_is_skipped() {
        let mut file = Watched::new();
        file.add(&"x".repeat(LONGEST_LINE as usize + 10));
        assert_eq!(file.sees(), (false, vec![]));
        file.add(&format!("{}{}", line(1), line(2)));
        assert_eq!(file.sees(), (false, vec![2]));
    }

    #[test]
    fn the_error_names_a_missing_file() {
        let error = read(Path::new("/no/such/metrics.jsonl")).unwrap_err().to_string();
        assert!(error.contains("/no/such/metrics.jsonl"), "{error}");
    }
}
