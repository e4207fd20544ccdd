//! The progress that a person sees while a run works; only rank 0 shows it.
//!
//! ```text
//!   on a terminal   epoch 2/5 ━━━━━━━━────────  25/49 loss 1.464  acc 47.391%  812 img/s  ETA 0:01:03
//!   elsewhere          == step: [25/49] [2/5] | loss: 1.464 | acc: 47.391% | lr: 0.0200 | 812 img/s | ETA: 0:01:03
//! ```
//!
//! The program chooses which figures are shown, and how they are written. A rank whose output goes through a launcher cannot
//! know where it ends, so it draws on the terminal that the launcher names.

mod pace;

use std::fs::{self, File, OpenOptions};
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

pub use pace::Pace;

/// Name of the log in `OUT_DIR`.
pub const LOG: &str = "log.txt";

/// The variable in which a launcher names the user's terminal.
const TERMINAL: &str = "DRUMLINE_TERMINAL";

const TEMPLATE: &str = "{prefix} {bar:12} {pos}/{len} {wide_msg}";
/// Redraws per second.
const RATE: u8 = 10;

/// A position in a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct At {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Number of epochs.
    pub epochs: u64,
    /// Steps done in this epoch.
    pub step: u64,
    /// Steps of an epoch.
    pub steps: u64,
}

/// A number with its name, as a person reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Figure<'a> {
    name: &'a str,
    text: String,
    is_in_bar: bool,
}

impl<'a> Figure<'a> {
    /// Such as `loss` and `1.464`.
    pub fn new(name: &'a str, text: impl Into<String>) -> Self {
        Self { name, text: text.into(), is_in_bar: true }
    }

    /// A figure that its unit explains, such as `812 img/s`.
    pub fn unnamed(text: impl Into<String>) -> Self {
        Self::new("", text)
    }

    /// Leaves the figure out of a bar, where there is little room.
    #[must_use]
    pub fn in_lines_only(mut self) -> Self {
        self.is_in_bar = false;
        self
    }

    fn written(&self, between: &str) -> String {
        match self.name {
            "" => self.text.clone(),
            name => format!("{name}{between}{}", self.text),
        }
    }
}

/// What rank 0 shows. Clones share one bar.
///
/// ```
/// use std::time::Duration;
/// use drumline_observe::bar::{At, Figure, Progress, step_line};
///
/// let progress = Progress::new(10); // a line every 10 steps, as the output of a test is no terminal
/// let at = At { epoch: 0, epochs: 5, step: 20, steps: 49 };
/// let figures = [Figure::new("loss", "1.464"), Figure::unnamed("812 img/s")];
/// progress.step(at, &figures, Some(Duration::from_secs(63)));
/// assert_eq!(
///     step_line(at, &figures, Some(Duration::from_secs(63))),
///     "   == step: [20/49] [1/5] | loss: 1.464 | 812 img/s | ETA: 0:01:03"
/// );
/// ```
#[derive(Debug, Clone)]
pub struct Progress {
    /// Steps between lines.
    every: u64,
    screen: Screen,
    log: Option<Arc<File>>,
}

#[derive(Debug, Clone)]
enum Screen {
    /// Another rank shows the progress.
    Hidden,
    Lines,
    Bar(ProgressBar),
}

impl Progress {
    /// For ranks that show nothing.
    pub fn silent() -> Self {
        Self { every: 1, screen: Screen::Hidden, log: None }
    }

    /// Prints a line to stdout every `every` steps, even if stdout is a terminal.
    pub fn lines(every: u64) -> Self {
        Self { every: every.max(1), screen: Screen::Lines, log: None }
    }

    /// A bar on the terminal that the launcher names in `DRUMLINE_TERMINAL`, or on this process's own terminal. Without a terminal,
    /// a line every `every` steps.
    pub fn new(every: u64) -> Self {
        let own = || {
            let shown = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
            shown.then(Term::stderr)
        };
        let named = std::env::var_os(TERMINAL).and_then(|path| opened(Path::new(&path)));
        match named.or_else(own) {
            Some(term) => {
                let bar = bar(ProgressDrawTarget::term(term, RATE));
                Self { every: every.max(1), screen: Screen::Bar(bar), log: None }
            }
            None => Self::lines(every),
        }
    }

    /// Also writes messages, and a line every `every` steps, to `log.txt` in this folder. The page shows the end of it. A silent
    /// one writes nothing.
    pub fn log_to(self, folder: &Path) -> io::Result<Self> {
        if matches!(self.screen, Screen::Hidden) {
            return Ok(self);
        }
        fs::create_dir_all(folder)?;
        let log = OpenOptions::new().create(true).append(true).open(folder.join(LOG))?;
        Ok(Self { log: Some(Arc::new(log)), ..self })
    }

    /// Adds a line to the log only, for example an error that is shown elsewhere.
    pub fn note(&self, line: &str) {
        if let Some(log) = &self.log {
            // If the log cannot be written, the run continues. One write per line, so that lines stay whole.
            let _ = (&**log).write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Prints a line for people, and adds it to the log.
    pub fn say(&self, line: &str) {
        self.note(line);
        match &self.screen {
            Screen::Hidden => {}
            Screen::Lines => print_line(line),
            Screen::Bar(bar) => bar.println(line),
        }
    }

    /// An epoch begins, or is resumed.
    pub fn begin_epoch(&self, at: At) {
        if let Screen::Bar(bar) = &self.screen {
            bar.reset();
            bar.set_length(at.steps);
            bar.set_position(at.step);
            bar.set_prefix(format!("epoch {}/{}", at.epoch + 1, at.epochs));
        }
    }

    /// A step is done; `left` is the time to the end of the run, if it is known.
    pub fn step(&self, at: At, figures: &[Figure<'_>], left: Option<Duration>) {
        let line = is_due(at, self.every).then(|| step_line(at, figures, left));
        line.iter().for_each(|line| self.note(line));
        match &self.screen {
            Screen::Hidden => {}
            Screen::Lines => line.iter().for_each(|line| print_line(line)),
            Screen::Bar(bar) => {
                bar.set_position(at.step);
                bar.set_message(message(figures, left));
            }
        }
    }

    /// Removes the bar; printed lines stay.
    pub fn finish(&self) {
        if let Screen::Bar(bar) = &self.screen {
            bar.finish_and_clear();
        }
    }
}

/// If stdout is closed, the run continues.
fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// The terminal at a path, if it is one that we may write to.
fn opened(path: &Path) -> Option<Term> {
    let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
    let again = file.try_clone().ok()?;
    file.is_terminal().then(|| Term::read_write_pair(again, file))
}

fn bar(target: ProgressDrawTarget) -> ProgressBar {
    let style = ProgressStyle::with_template(TEMPLATE).expect("the template is right");
    let bar = ProgressBar::with_draw_target(Some(0), target);
    bar.set_style(style.progress_chars("━━─"));
    bar
}

fn is_due(at: At, every: u64) -> bool {
    at.step.is_multiple_of(every) || at.step == at.steps
}

/// The line that is printed if there is no terminal.
pub fn step_line(at: At, figures: &[Figure<'_>], left: Option<Duration>) -> String {
    let width = at.steps.to_string().len();
    let At { epoch, epochs, step, steps } = at;
    let place = format!("   == step: [{step:width$}/{steps}] [{}/{epochs}]", epoch + 1);
    let figures = figures.iter().map(|figure| figure.written(": "));
    let eta = left.map(|left| format!("ETA: {}", clock(left)));
    [place].into_iter().chain(figures).chain(eta).collect::<Vec<_>>().join(" | ")
}

/// The text after a bar.
fn message(figures: &[Figure<'_>], left: Option<Duration>) -> String {
    let figures = figures.iter().filter(|figure| figure.is_in_bar).map(|figure| figure.written(" "));
    figures.chain(left.map(|left| format!("ETA {}", clock(left)))).collect::<Vec<_>>().join("  ")
}

fn clock(left: Duration) -> String {
    let seconds = left.as_secs();
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::InMemoryTerm;

    const AT: At = At { epoch: 1, epochs: 5, step: 25, steps: 149 };

    fn figures() -> [Figure<'static>; 3] {
        [
            Figure::new("loss", "1.464"),
            Figure::new("lr", "0.0200").in_lines_only(),
            Figure::unnamed("812 img/s"),
        ]
    }

    #[test]
    fn a_line_has_all_figures_and_a_bar_only_some() {
        let left = Some(Duration::from_secs(3_723));
        let line = "   == step: [ 25/149] [2/5] | loss: 1.464 | lr: 0.0200 | 812 img/s | ETA: 1:02:03";
        assert_eq!(step_line(AT, &figures(), left), line);
        assert_eq!(message(&figures(), left), "loss 1.464  812 img/s  ETA 1:02:03");
        assert_eq!(step_line(AT, &[], None), "   == step: [ 25/149] [2/5]");
    }

    #[test]
    fn a_bar_shows_epoch_steps_and_figures() {
        let term = InMemoryTerm::new(5, 90);
        let drawn = bar(ProgressDrawTarget::term_like(Box::new(term.clone())));
        let progress = Progress { every: 1, screen: Screen::Bar(drawn), log: None };
        progress.begin_epoch(At { step: 0, ..AT });
        progress.step(AT, &figures(), Some(Duration::from_secs(63)));
        if let Screen::Bar(bar) = &progress.screen {
            bar.force_draw();
        }
        let seen = term.contents();
        assert!(
            seen.starts_with("epoch 2/5 ━") && seen.contains(" 25/149 loss 1.464  812 img/s  ETA 0:01:03"),
            "{seen}"
        );
        progress.say("a message");
        progress.finish();
        assert_eq!(term.contents(), "a message", "the bar is removed, messages stay");
    }

    #[test]
    fn a_line_comes_every_so_many_steps_and_at_the_end() {
        let due: Vec<_> = (1..=7).filter(|step| is_due(At { step: *step, steps: 7, ..AT }, 3)).collect();
        assert_eq!(due, [3, 6, 7]);
    }

    #[test]
    fn the_log_has_messages_and_lines() {
        let folder = tempfile::tempdir().unwrap();
        let progress = Progress::lines(5).log_to(folder.path()).unwrap();
        progress.say("a message");
        (24..=26).for_each(|step| progress.step(At { step, ..AT }, &[], None));
        progress.note("error: on purpose");
        drop(Progress::silent().log_to(folder.path()).unwrap());
        let log = std::fs::read_to_string(folder.path().join(LOG)).unwrap();
        assert_eq!(log, "a message\n   == step: [ 25/149] [2/5]\nerror: on purpose\n");
    }

    #[test]
    fn nothing_is_drawn_on_what_is_no_terminal() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(opened(file.path()).is_none() && opened(Path::new("/no/such/terminal")).is_none());
    }
}
