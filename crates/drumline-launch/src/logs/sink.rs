//! The destinations of one stream that the pump reads.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::time::Instant;

use super::bars::Paced;
use super::plan::{Bars, Route};
use super::prefix::{Named, coloured, prefix};
use super::region::Owner;
use super::{AttemptLogs, Channel, Consoles, LogError};
use crate::lines::{Lines, Rendering};

/// How many bytes are split into lines at once: each byte can be a line, and each line gets a prefix.
const SLICE: usize = 16 << 10;

/// The destinations of one stream.
#[derive(Debug)]
pub(crate) struct Sink {
    channel: Channel,
    file: Option<File>,
    console: Option<ConsoleStream>,
    filtered: Option<FilteredFile>,
}

/// A stream on the console.
#[derive(Debug)]
enum ConsoleStream {
    Paced(Paced),
    Redrawn(Redrawn),
}

/// Lines, and bars that are redrawn in rows of the terminal.
#[derive(Debug)]
struct Redrawn {
    lines: Lines,
    owner: Owner,
    has_rows: bool,
}

/// Lines that match a filter, in a file that all workers share: each line is written at once.
#[derive(Debug)]
struct FilteredFile {
    file: File,
    lines: Paced,
}

impl FilteredFile {
    fn open(logs: &AttemptLogs, worker: &Named<'_>, channel: Channel) -> Result<Option<Self>, LogError> {
        let texts = logs.plan.duplicates.of(channel);
        let lines = || Paced::new(Lines::filtered(prefix(worker, logs.plan.prefix.as_deref()), texts));
        Ok(logs.open_filtered(channel)?.map(|file| Self { file, lines: lines() }))
    }

    fn write(&mut self, make: impl FnOnce(&mut Paced, &mut Vec<u8>)) -> io::Result<()> {
        let mut out = Vec::new();
        make(&mut self.lines, &mut out);
        if out.is_empty() { Ok(()) } else { self.file.write_all(&out) }
    }
}

impl ConsoleStream {
    fn take(&mut self, bytes: &[u8], now: Instant, channel: Channel, consoles: &mut Consoles) {
        let console = consoles.of(channel);
        let slices = bytes.chunks(SLICE);
        match self {
            Self::Paced(paced) => {
                slices.for_each(|slice| console.print_with(|out| paced.feed(slice, now, out)));
            }
            Self::Redrawn(Redrawn { lines, owner, has_rows }) => {
                slices.for_each(|slice| console.print_with(|out| lines.feed(slice, out)));
                let rows: Vec<_> = lines.states().collect();
                if *has_rows || !rows.is_empty() {
                    *has_rows = !rows.is_empty();
                    console.set_rows(*owner, rows, now);
                }
            }
        }
    }

    fn end(self, channel: Channel, consoles: &mut Consoles) {
        let console = consoles.of(channel);
        match self {
            Self::Paced(mut paced) => console.print_with(|out| paced.finish(out)),
            Self::Redrawn(Redrawn { mut lines, owner, .. }) => {
                console.set_rows(owner, Vec::new(), Instant::now());
                console.print_with(|out| lines.finish(out));
            }
        }
    }
}

impl Sink {
    /// A sink for a stream that only the report uses.
    pub(crate) fn nowhere(channel: Channel) -> Self {
        Self { channel, file: None, console: None, filtered: None }
    }

    /// A sink for a stream whose whole lines go to the console without a prefix.
    pub(crate) fn console_only(channel: Channel) -> Self {
        let rendering = if is_terminal(channel) { Rendering::Visible } else { Rendering::Raw };
        let lines = Paced::new(Lines::new(String::new(), rendering));
        Self { console: Some(ConsoleStream::Paced(lines)), ..Self::nowhere(channel) }
    }

    /// A sink for a stream that goes where the plan of `logs` says.
    pub(crate) fn open(
        logs: &AttemptLogs,
        rank: usize,
        local_rank: usize,
        channel: Channel,
    ) -> Result<Self, LogError> {
        let Route { file, console } = logs.plan.route(rank, local_rank, channel);
        let file = if file { logs.open(local_rank, channel)? } else { None };
        let worker = Named { role: &logs.role, rank, local_rank };
        let filtered = if console { FilteredFile::open(logs, &worker, channel)? } else { None };
        let console = console.then(|| console_stream(&worker, logs, channel));
        Ok(Self { channel, file, console, filtered })
    }

    /// Processes bytes that were read.
    pub(crate) fn take(&mut self, bytes: &[u8], now: Instant, consoles: &mut Consoles) {
        if let Some(Err(error)) = self.file.as_mut().map(|file| file.write_all(bytes)) {
            tracing::warn!(%error, "a worker's log file cannot be written any more; it ends here");
            self.file = None;
        }
        let write = |slice| self.write_filtered(|lines, out| lines.feed(slice, now, out));
        bytes.chunks(SLICE).for_each(write);
        if let Some(console) = &mut self.console {
            console.take(bytes, now, self.channel, consoles);
        }
    }

    fn write_filtered(&mut self, make: impl FnOnce(&mut Paced, &mut Vec<u8>)) {
        if let Some(Err(error)) = self.filtered.as_mut().map(|filtered| filtered.write(make)) {
            tracing::warn!(%error, "the file of filtered lines cannot be written any more; it ends here");
            self.filtered = None;
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn due(&self) -> Option<Instant> {
        let console = match &self.console {
            Some(ConsoleStream::Paced(paced)) => paced.due(),
            _ => None,
        };
        console.into_iter().chain(self.filtered.as_ref().and_then(|filtered| filtered.lines.due())).min()
    }

    /// Emits the states of bars that are due.
    pub(crate) fn tick(&mut self, now: Instant, consoles: &mut Consoles) {
        self.write_filtered(|lines, out| lines.tick(now, out));
        if let Some(ConsoleStream::Paced(paced)) = &mut self.console {
            consoles.of(self.channel).print_with(|out| paced.tick(now, out));
        }
    }

    /// Ends the stream.
    pub(crate) fn end(&mut self, consoles: &mut Consoles) {
        self.write_filtered(Paced::finish);
        self.filtered = None;
        if let Some(console) = self.console.take() {
            console.end(self.channel, consoles);
        }
        self.file = None;
    }
}

fn console_stream(worker: &Named<'_>, logs: &AttemptLogs, channel: Channel) -> ConsoleStream {
    let prefix = prefix(worker, logs.plan.prefix.as_deref());
    if !is_terminal(channel) {
        return ConsoleStream::Paced(Paced::new(Lines::new(prefix, Rendering::Raw)));
    }
    let is_set = |name: &str, found: fn(&str) -> bool| std::env::var(name).is_ok_and(|value| found(&value));
    let plain = is_set("NO_COLOR", |value| !value.is_empty());
    let lines = Lines::new(if plain { prefix } else { coloured(&prefix, worker.rank) }, Rendering::Visible);
    let can_redraw = !is_set("TERM", |value| value == "dumb");
    match logs.plan.bars {
        Bars::Redrawn if can_redraw => {
            ConsoleStream::Redrawn(Redrawn { lines, owner: (worker.rank, channel as u8), has_rows: false })
        }
        _ => ConsoleStream::Paced(Paced::new(lines)),
    }
}

fn is_terminal(channel: Channel) -> bool {
    match channel {
        Channel::Out => io::stdout().is_terminal(),
        Channel::Err => io::stderr().is_terminal(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_ends_the_file_but_not_the_reading() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Sink { file: Some(full), ..Sink::nowhere(Channel::Out) };
        let take = |sink: &mut Sink, text: &[u8]| sink.take(text, Instant::now(), &mut Consoles::default());
        take(&mut sink, b"lost");
        assert!(sink.file.is_none());
        take(&mut sink, b"no matter");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let lines = Paced::new(Lines::filtered(String::new(), &["x".to_string()]));
        sink.filtered = Some(FilteredFile { file: full, lines });
        take(&mut sink, b"nothing\n");
        assert!(sink.filtered.is_some(), "control: nothing was written");
        take(&mut sink, b"x\n");
        assert!(sink.filtered.is_none());
    }
}
