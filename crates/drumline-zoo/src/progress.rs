//! What a person sees of a run: one line from each rank at the start, then rank 0 alone.
//!
//! ```text
//!   on a terminal   epoch 2/5 ━━━━━━━━────────  25/49 loss 1.464  acc 47.391%  812 img/s  ETA 0:01:03
//!   elsewhere          == step: [25/49] [2/5] | loss: 1.464 | acc: 47.391% | lr: 0.0200 | 812 img/s | ETA: 0:01:03
//! ```
//!
//! Loss and accuracy are means over the epoch so far and over all ranks. A rank whose output goes through a launcher cannot
//! tell where it ends; it draws on the terminal that it is told of.

use std::fs::OpenOptions;
use std::io::IsTerminal;
use std::path::Path;
use std::time::Duration;

use console::Term;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const TEMPLATE: &str = "{prefix} {bar:12} {pos}/{len} {wide_msg}";
/// Drawings in a second.
const RATE: u8 = 10;

/// What every rank says once.
pub fn init_line(local_rank: usize, rank: usize) -> String {
    format!("[init] == local rank: {local_rank}, global rank: {rank} ==")
}

/// Where an epoch is.
#[derive(Debug, Clone, Copy, PartialEq)]
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

/// What is shown of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Shown {
    /// Mean over the epoch so far.
    pub loss: f64,
    /// Percent of the epoch so far.
    pub acc1: f64,
    /// Learning rate.
    pub lr: f64,
    /// Images of all ranks in a second.
    pub images_per_s: f64,
    /// Time to the end of the run.
    pub left: Duration,
}

/// What rank 0 shows.
#[derive(Debug)]
pub struct Progress {
    /// Steps between lines.
    every: u64,
    screen: Screen,
}

#[derive(Debug)]
enum Screen {
    /// Another rank speaks.
    Nobody,
    Lines,
    Bar(ProgressBar),
}

impl Progress {
    /// For ranks that show nothing.
    pub fn silent() -> Self {
        Self { every: 1, screen: Screen::Nobody }
    }

    /// A bar on `terminal`, or on this process's own; where there is none, a line each `every` steps.
    pub fn new(every: u64, terminal: Option<&Path>) -> Self {
        let own = || {
            let shown = std::io::stdout().is_terminal() && std::io::stderr().is_terminal();
            shown.then(Term::stderr)
        };
        let target = terminal.and_then(opened).or_else(own);
        let screen = match target {
            Some(term) => Screen::Bar(bar(ProgressDrawTarget::term(term, RATE))),
            None => Screen::Lines,
        };
        Self { every: every.max(1), screen }
    }

    /// Says a line that is for people.
    pub fn say(&self, line: &str) {
        match &self.screen {
            Screen::Nobody => {}
            Screen::Lines => tell(line),
            Screen::Bar(bar) => bar.println(line),
        }
    }

    /// An epoch begins, or goes on.
    pub fn begin_epoch(&self, at: At) {
        if let Screen::Bar(bar) = &self.screen {
            bar.reset();
            bar.set_length(at.steps);
            bar.set_position(at.step);
            bar.set_prefix(format!("epoch {}/{}", at.epoch + 1, at.epochs));
        }
    }

    /// A step is done.
    pub fn step(&self, at: At, shown: &Shown) {
        match &self.screen {
            Screen::Nobody => {}
            Screen::Lines if is_due(at, self.every) => tell(&step_line(at, shown)),
            Screen::Lines => {}
            Screen::Bar(bar) => {
                bar.set_position(at.step);
                bar.set_message(message(shown));
            }
        }
    }

    /// Takes the bar away; what was said stays.
    pub fn finish(&self) {
        if let Screen::Bar(bar) = &self.screen {
            bar.finish_and_clear();
        }
    }
}

/// A stdout that is gone ends nothing.
fn tell(line: &str) {
    use std::io::Write;
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

fn step_line(at: At, shown: &Shown) -> String {
    let width = at.steps.to_string().len();
    let At { epoch, epochs, step, steps } = at;
    let Shown { loss, acc1, lr, images_per_s, left } = shown;
    let place = format!("   == step: [{step:width$}/{steps}] [{}/{epochs}]", epoch + 1);
    let eta = clock(*left);
    format!(
        "{place} | loss: {loss:.3} | acc: {acc1:6.3}% | lr: {lr:.4} | {images_per_s:.0} img/s | ETA: {eta}"
    )
}

fn message(shown: &Shown) -> String {
    let Shown { loss, acc1, images_per_s, left, .. } = shown;
    format!("loss {loss:.3}  acc {acc1:6.3}%  {images_per_s:.0} img/s  ETA {}", clock(*left))
}

fn clock(left: Duration) -> String {
    let seconds = left.as_secs();
    format!("{}:{:02}:{:02}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: At = At { epoch: 1, epochs: 5, step: 25, steps: 149 };

    #[test]
    fn lines_are_as_in_the_tutorial() {
        let left = Duration::from_secs(3_723);
        let shown = Shown { loss: 1.4641, acc1: 47.3912, lr: 0.02, images_per_s: 812.4, left };
        let line = step_line(AT, &shown);
        let expected = "   == step: [ 25/149] [2/5] | loss: 1.464 | acc: 47.391% | lr: 0.0200 | 812 img/s | ETA: 1:02:03";
        assert_eq!(line, expected);
        assert_eq!(init_line(1, 3), "[init] == local rank: 1, global rank: 3 ==");
    }

    #[test]
    fn a_line_comes_every_so_many_steps_and_at_the_end() {
        let due: Vec<_> = (1..=7).filter(|step| is_due(At { step: *step, steps: 7, ..AT }, 3)).collect();
        assert_eq!(due, [3, 6, 7]);
    }

    #[test]
    fn what_is_no_terminal_is_not_drawn_on() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(opened(file.path()).is_none() && opened(Path::new("/no/such/terminal")).is_none());
    }
}
