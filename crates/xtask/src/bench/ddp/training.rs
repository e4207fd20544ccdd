//! Who trains, what each must print, and the check that all trained the same.

use crate::bench::child;
use crate::bench::contender::Contender;
use crate::bench::contest::{Contest, TallyOf, UnitOf};
use crate::bench::json_line::JsonLine;
use crate::bench::losses::SameLosses;
use crate::bench::sides::{Side, Sides};
use anyhow::Context;
use std::fmt;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
const SAME: SameLosses = SameLosses { tolerance: 2e-3, steps: 10 };

/// How a contender trains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct How {
    side: Side,
    ranks: usize,
    mode: &'static str,
}

type Trainer = Contender<How>;

const fn trainer(name: &'static str, side: Side, ranks: usize, mode: &'static str) -> Trainer {
    Contender::new(name, How { side, ranks, mode })
}

pub(crate) const OURS: Trainer = trainer("Drumline, 2 ranks", Side::Ours, 2, "ddp");
/// Two ranks that share nothing but the machine.
pub(crate) const OURS_INDEPENDENT: Trainer =
    trainer("Drumline, 2 processes that do not communicate", Side::Ours, 2, "independent");
pub(crate) const TORCH: Trainer = trainer("PyTorch DDP, 2 ranks", Side::Torch, 2, "ddp");
pub(crate) const TORCH_TUNED: Trainer = trainer("PyTorch DDP tuned, 2 ranks", Side::TorchTuned, 2, "ddp");
pub(crate) const OURS_ALONE: Trainer = trainer("Drumline, 1 process", Side::Ours, 1, "alone");
pub(crate) const TORCH_ALONE: Trainer = trainer("PyTorch, 1 process", Side::Torch, 1, "alone");
pub(crate) const TORCH_ALONE_TUNED: Trainer =
    trainer("PyTorch tuned, 1 process", Side::TorchTuned, 1, "alone");
pub(crate) const ALL: [Trainer; 7] =
    [OURS, OURS_INDEPENDENT, TORCH, TORCH_TUNED, OURS_ALONE, TORCH_ALONE, TORCH_ALONE_TUNED];

/// Images of a rank's batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Batch(pub(crate) usize);

impl fmt::Display for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "batch {}", self.0)
    }
}

/// What a turn gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figures {
    pub(crate) step_ms: f64,
    pub(crate) images_per_s: f64,
    pub(crate) losses: Vec<f64>,
    pub(crate) peak_bytes: f64,
}

/// The contest.
#[derive(Debug)]
pub(crate) struct Training {
    pub(crate) sides: Sides,
    pub(crate) steps: usize,
}

impl Contest for Training {
    type Case = Batch;
    type Kind = How;
    type Figures = Figures;

    fn contenders(&self, _batch: Batch) -> Vec<Trainer> {
        ALL.to_vec()
    }

    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Figures> {
        let How { side, ranks, mode } = unit.contender.kind;
        let mut command = self.sides.start(side, ranks, "step");
        let (batch, steps) = (unit.case.0.to_string(), self.steps.to_string());
        command.args(["--mode", mode, "--batch", &batch, "--steps", &steps]);
        let printed = child::run(command, LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("it printed `{}`", printed.stdout.trim_end()))
    }

    /// A contender must have trained what the first one with as many ranks did. Processes that do not communicate
    /// train models of their own.
    fn check(&self, unit: &UnitOf<Self>, figures: &Figures, tally: &TallyOf<Self>) -> anyhow::Result<()> {
        let same_data = |other: &UnitOf<Self>| {
            let ranks = |unit: &UnitOf<Self>| unit.contender.kind.ranks;
            (other.case, ranks(other)) == (unit.case, ranks(unit)) && other.contender != OURS_INDEPENDENT
        };
        match tally.all().find(|turn| same_data(&turn.unit)) {
            Some(turn) if unit.contender != OURS_INDEPENDENT => {
                SAME.check(&figures.losses, &turn.figures.losses)
            }
            _ => Ok(()),
        }
    }
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    Ok(Figures {
        step_ms: line.number("step_ms")?,
        images_per_s: line.number("images_per_s")?,
        losses: line.numbers("losses")?,
        peak_bytes: line.number("peak_bytes")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::contest::Unit;
    use crate::bench::tally::{Tally, Turn};

    #[test]
    fn a_line_must_have_all_figures() {
        let line = r#"{"step_ms": 2.5, "images_per_s": 10, "losses": [1.0, 0.5], "peak_bytes": 7}"#;
        let figures = parse(line).unwrap();
        assert_eq!((figures.step_ms, figures.losses.len()), (2.5, 2));
        assert!(parse("{\"step_ms\": 1}").is_err());
    }

    fn with(losses: &[f64]) -> Figures {
        Figures { step_ms: 1.0, images_per_s: 1.0, losses: losses.to_vec(), peak_bytes: 1.0 }
    }

    #[test]
    fn a_contender_that_trains_something_else_is_found_out() {
        let contest = Training { sides: Sides::default(), steps: 2 };
        let mut tally = Tally::default();
        let unit = |contender| Unit { case: Batch(32), contender };
        for (contender, losses) in [(OURS_INDEPENDENT, [9.0, 9.0]), (TORCH, [2.0, 1.0])] {
            let figures = with(&losses);
            contest.check(&unit(contender), &figures, &tally).unwrap();
            tally.add(Turn { unit: unit(contender), block: 0, figures, steady: true });
        }
        let is_same = |contender| contest.check(&unit(contender), &with(&[3.0, 3.0]), &tally).is_ok();
        assert_eq!([OURS, OURS_INDEPENDENT, OURS_ALONE].map(is_same), [false, true, true]);
    }
}
