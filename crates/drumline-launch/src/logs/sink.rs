//! Where the pump puts what it has read of one stream.

use std::fs::File;
use std::io::{self, IsTerminal, Write};

use super::plan::Route;
use super::prefix::{Named, coloured, prefix};
use super::{AttemptLogs, Channel, Consoles, LogError};
use crate::lines::{Lines, Look};

/// How much is cut into lines at once: each of its bytes can be a line, and each line gets a prefix.
const SLICE: usize = 16 << 10;

/// One stream's ways out.
#[derive(Debug)]
pub(crate) struct Sink {
    channel: Channel,
    file: Option<File>,
    lines: Option<Lines>,
    chosen: Option<Chosen>,
}

/// Lines that go into a file that all workers share: each is written in one go.
#[derive(Debug)]
struct Chosen {
    file: File,
    lines: Lines,
}

impl Chosen {
    fn open(logs: &AttemptLogs, worker: &Named<'_>, channel: Channel) -> Result<Option<Self>, LogError> {
        let texts = logs.plan.duplicates.of(channel);
        let lines = || Lines::filtered(prefix(worker, logs.plan.prefix.as_deref()), texts);
        Ok(logs.open_filtered(channel)?.map(|file| Self { file, lines: lines() }))
    }

    fn write(&mut self, make: impl FnOnce(&mut Lines, &mut Vec<u8>)) -> io::Result<()> {
        let mut out = Vec::new();
        make(&mut self.lines, &mut out);
        if out.is_empty() { Ok(()) } else { self.file.write_all(&out) }
    }
}

impl Sink {
    /// For a stream that only the report has.
    pub(crate) fn nowhere(channel: Channel) -> Self {
        Self { channel, file: None, lines: None, chosen: None }
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
        let lines = console.then(|| lines(&worker, logs.plan.prefix.as_deref(), channel));
        let chosen = if console { Chosen::open(logs, &worker, channel)? } else { None };
        Ok(Self { channel, file, lines, chosen })
    }

    /// Takes what was read.
    pub(crate) fn take(&mut self, bytes: &[u8], consoles: &mut Consoles) {
        if let Some(Err(error)) = self.file.as_mut().map(|file| file.write_all(bytes)) {
            tracing::warn!(%error, "a worker's log file ends here: it cannot be written any more");
            self.file = None;
        }
        let chosen = |slice| self.choose(|lines, out| lines.feed(slice, out));
        bytes.chunks(SLICE).for_each(chosen);
        if let Some(lines) = &mut self.lines {
            let console = consoles.of(self.channel);
            bytes.chunks(SLICE).for_each(|slice| console.print_with(|out| lines.feed(slice, out)));
        }
    }

    fn choose(&mut self, make: impl FnOnce(&mut Lines, &mut Vec<u8>)) {
        if let Some(Err(error)) = self.chosen.as_mut().map(|chosen| chosen.write(make)) {
            tracing::warn!(%error, "the file of chosen lines ends here: it cannot be written any more");
            self.chosen = None;
        }
    }

    /// The stream has ended.
    pub(crate) fn end(&mut self, consoles: &mut Consoles) {
        self.choose(Lines::finish);
        self.chosen = None;
        if let Some(mut lines) = self.lines.take() {
            consoles.of(self.channel).print_with(|out| lines.finish(out));
        }
        self.file = None;
    }
}

fn lines(worker: &Named<'_>, template: Option<&str>, channel: Channel) -> Lines {
    let terminal = match channel {
        Channel::Out => io::stdout().is_terminal(),
        Channel::Err => io::stderr().is_terminal(),
    };
    let prefix = prefix(worker, template);
    if !terminal {
        return Lines::new(prefix, Look::Raw);
    }
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    Lines::new(if plain { prefix } else { coloured(&prefix, worker.rank) }, Look::Visible)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_ends_the_file_and_not_the_reading() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Sink { channel: Channel::Out, file: Some(full), lines: None, chosen: None };
        sink.take(b"lost", &mut Consoles::default());
        assert!(sink.file.is_none());
        sink.take(b"no matter", &mut Consoles::default());
        let full = File::options().write(true).open("/dev/full").unwrap();
        sink.chosen = Some(Chosen { file: full, lines: Lines::filtered(String::new(), &["x".to_string()]) });
        sink.take(b"nothing\n", &mut Consoles::default());
        assert!(sink.chosen.is_some(), "control: nothing was written");
        sink.take(b"x\n", &mut Consoles::default());
        assert!(sink.chosen.is_none());
    }
}
