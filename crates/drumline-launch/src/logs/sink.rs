//! Where the pump puts what it has read of one stream.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::time::Instant;

use super::bars::Paced;
use super::plan::{Bars, Route};
use super::prefix::{Named, coloured, prefix};
use super::region::Owner;
use super::{AttemptLogs, Channel, Consoles, LogError};
use crate::lines::{Lines, Look};

/// How much is cut into lines at once: each of its bytes can be a line, and each line gets a prefix.
const SLICE: usize = 16 << 10;

/// One stream's ways out.
#[derive(Debug)]
pub(crate) struct Sink {
    channel: Channel,
    file: Option<File>,
    shown: Option<Shown>,
    chosen: Option<Chosen>,
}

/// A stream on the console.
#[derive(Debug)]
enum Shown {
    Paced(Paced),
    Redrawn(Redrawn),
}

/// Lines, and bars in rows of the terminal.
#[derive(Debug)]
struct Redrawn {
    lines: Lines,
    owner: Owner,
    has_rows: bool,
}

/// Lines that go into a file that all workers share: each is written in one go.
#[derive(Debug)]
struct Chosen {
    file: File,
    lines: Paced,
}

impl Chosen {
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

impl Shown {
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
    /// For a stream that only the report has.
    pub(crate) fn nowhere(channel: Channel) -> Self {
        Self { channel, file: None, shown: None, chosen: None }
    }

    /// For a stream whose lines are shown as they are, each of them whole.
    pub(crate) fn shown(channel: Channel) -> Self {
        let look = if is_terminal(channel) { Look::Visible } else { Look::Raw };
        let lines = Paced::new(Lines::new(String::new(), look));
        Self { shown: Some(Shown::Paced(lines)), ..Self::nowhere(channel) }
    }

    /// For a stream that goes where the plan of `logs` says.
    pub(crate) fn open(
        logs: &AttemptLogs,
        rank: usize,
        local_rank: usize,
        channel: Channel,
    ) -> Result<Self, LogError> {
        let Route { file, console } = logs.plan.route(rank, local_rank, channel);
        let file = if file { logs.open(local_rank, channel)? } else { None };
        let worker = Named { role: &logs.role, rank, local_rank };
        let shown = console.then(|| shown(&worker, logs, channel));
        let chosen = if console { Chosen::open(logs, &worker, channel)? } else { None };
        Ok(Self { channel, file, shown, chosen })
    }

    /// Takes what was read.
    pub(crate) fn take(&mut self, bytes: &[u8], now: Instant, consoles: &mut Consoles) {
        if let Some(Err(error)) = self.file.as_mut().map(|file| file.write_all(bytes)) {
            tracing::warn!(%error, "a worker's log file ends here: it cannot be written any more");
            self.file = None;
        }
        let chosen = |slice| self.choose(|lines, out| lines.feed(slice, now, out));
        bytes.chunks(SLICE).for_each(chosen);
        if let Some(shown) = &mut self.shown {
            shown.take(bytes, now, self.channel, consoles);
        }
    }

    fn choose(&mut self, make: impl FnOnce(&mut Paced, &mut Vec<u8>)) {
        if let Some(Err(error)) = self.chosen.as_mut().map(|chosen| chosen.write(make)) {
            tracing::warn!(%error, "the file of chosen lines ends here: it cannot be written any more");
            self.chosen = None;
        }
    }

    /// When [`tick`](Self::tick) has something to do.
    pub(crate) fn due(&self) -> Option<Instant> {
        let shown = match &self.shown {
            Some(Shown::Paced(paced)) => paced.due(),
            _ => None,
        };
        shown.into_iter().chain(self.chosen.as_ref().and_then(|chosen| chosen.lines.due())).min()
    }

    /// Lets states of bars out whose time has come.
    pub(crate) fn tick(&mut self, now: Instant, consoles: &mut Consoles) {
        self.choose(|lines, out| lines.tick(now, out));
        if let Some(Shown::Paced(paced)) = &mut self.shown {
            consoles.of(self.channel).print_with(|out| paced.tick(now, out));
        }
    }

    /// The stream has ended.
    pub(crate) fn end(&mut self, consoles: &mut Consoles) {
        self.choose(Paced::finish);
        self.chosen = None;
        if let Some(shown) = self.shown.take() {
            shown.end(self.channel, consoles);
        }
        self.file = None;
    }
}

fn shown(worker: &Named<'_>, logs: &AttemptLogs, channel: Channel) -> Shown {
    let prefix = prefix(worker, logs.plan.prefix.as_deref());
    if !is_terminal(channel) {
        return Shown::Paced(Paced::new(Lines::new(prefix, Look::Raw)));
    }
    let is_set = |name: &str, found: fn(&str) -> bool| std::env::var(name).is_ok_and(|value| found(&value));
    let plain = is_set("NO_COLOR", |value| !value.is_empty());
    let lines = Lines::new(if plain { prefix } else { coloured(&prefix, worker.rank) }, Look::Visible);
    let can_redraw = !is_set("TERM", |value| value == "dumb");
    match logs.plan.bars {
        Bars::Redrawn if can_redraw => {
            Shown::Redrawn(Redrawn { lines, owner: (worker.rank, channel as u8), has_rows: false })
        }
        _ => Shown::Paced(Paced::new(lines)),
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
    fn a_full_disk_ends_the_file_and_not_the_reading() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Sink { file: Some(full), ..Sink::nowhere(Channel::Out) };
        let take = |sink: &mut Sink, text: &[u8]| sink.take(text, Instant::now(), &mut Consoles::default());
        take(&mut sink, b"lost");
        assert!(sink.file.is_none());
        take(&mut sink, b"no matter");
        let full = File::options().write(true).open("/dev/full").unwrap();
        let lines = Paced::new(Lines::filtered(String::new(), &["x".to_string()]));
        sink.chosen = Some(Chosen { file: full, lines });
        take(&mut sink, b"nothing\n");
        assert!(sink.chosen.is_some(), "control: nothing was written");
        take(&mut sink, b"x\n");
        assert!(sink.chosen.is_none());
    }
}
