//! Who trains or sleeps, what each must print, and the check that all trained the same.

use crate::bench::child;
use crate::bench::contender::Contender;
use crate::bench::contest::{Contest, TallyOf, Unit, UnitOf};
use crate::bench::json_line::JsonLine;
use crate::bench::losses::SameLosses;
use crate::bench::sides::{Side, Sides};
use anyhow::Context;
use std::fmt;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);
const SAME: SameLosses = SameLosses { tolerance: 1e-4, steps: usize::MAX };
/// Micro-batches of stages that sleep.
pub(crate) const SLEEP_MICRO_BATCHES: usize = 32;
/// What a rank sleeps for a forward, in milliseconds.
pub(crate) const SLEEP_MS: usize = 5;
const SLEEP_STEPS: usize = 3;
/// The ranks with which PyTorch's runtime sleeps too.
pub(crate) const COMPARED_RANKS: usize = 8;
const SCHEDULES: [&str; 6] = ["gpipe", "1f1b", "interleaved", "bfs", "zb1p", "zbv"];

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Case {
    /// Steps of the GPT on two ranks.
    Train { micro_batches: usize, batch: usize, places: usize },
    /// Stages that sleep.
    Sleep { ranks: usize, schedule: &'static str },
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Train { micro_batches, batch, places } => {
                write!(f, "GPT, {micro_batches} micro-batches of {batch} x {places}")
            }
            Self::Sleep { ranks, schedule } => write!(f, "sleeping, {ranks} ranks, {schedule}"),
        }
    }
}

const TRAINED: [Case; 3] = [
    Case::Train { micro_batches: 16, batch: 1, places: 16 },
    Case::Train { micro_batches: 16, batch: 1, places: 64 },
    Case::Train { micro_batches: 8, batch: 2, places: 128 },
];

/// The cases of a run.
pub(crate) fn cases() -> Vec<Case> {
    let sleeping = |ranks| SCHEDULES.map(|schedule| Case::Sleep { ranks, schedule });
    TRAINED.into_iter().chain([2, COMPARED_RANKS, 32].into_iter().flat_map(sleeping)).collect()
}

/// The cases of a quick run.
pub(crate) fn quick_cases() -> Vec<Case> {
    let sleeping = |ranks, schedule| Case::Sleep { ranks, schedule };
    vec![TRAINED[0], sleeping(2, "zbv"), sleeping(COMPARED_RANKS, "1f1b")]
}

/// How a contender does it: on our side with all stages on one rank or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct How {
    side: Side,
    word: &'static str,
}

type Trainer = Contender<How>;

const fn contender(name: &'static str, side: Side, word: &'static str) -> Trainer {
    Contender::new(name, How { side, word })
}

pub(crate) const OURS: Trainer = contender("Drumline", Side::Ours, "pipeline");
/// All stages, and no messages.
pub(crate) const ONE_RANK: Trainer = contender("Drumline, one rank", Side::Ours, "alone");
pub(crate) const TORCH: Trainer = contender("PyTorch", Side::Torch, "pipeline");
pub(crate) const TORCH_TUNED: Trainer = contender("PyTorch tuned", Side::TorchTuned, "pipeline");

fn contenders(case: Case) -> Vec<Trainer> {
    match case {
        Case::Train { .. } => vec![OURS, ONE_RANK, TORCH, TORCH_TUNED],
        Case::Sleep { ranks: COMPARED_RANKS, .. } => vec![OURS, TORCH],
        Case::Sleep { .. } => vec![OURS],
    }
}

/// All units of these cases, in the order of a report.
pub(crate) fn units(cases: &[Case]) -> Vec<Unit<Case, How>> {
    let of_case = |&case| contenders(case).into_iter().map(move |contender| Unit { case, contender });
    cases.iter().flat_map(of_case).collect()
}

/// What a turn gave.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Figures {
    /// The time of a step, of stages that sleep too.
    pub(crate) step_ms: f64,
    /// Of a GPT.
    pub(crate) losses: Vec<f64>,
    /// Of ours on several ranks: what the simulator says, with messages that take no time.
    pub(crate) ideal_ms: Option<f64>,
    /// The same with messages as they are.
    pub(crate) simulated_ms: Option<f64>,
    /// The time of a message.
    pub(crate) hop_ms: Option<f64>,
}

/// The contest.
#[derive(Debug)]
pub(crate) struct Pipelines {
    pub(crate) sides: Sides,
    pub(crate) steps: usize,
}

impl Contest for Pipelines {
    type Case = Case;
    type Kind = How;
    type Figures = Figures;

    fn contenders(&self, case: Case) -> Vec<Trainer> {
        contenders(case)
    }

    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Figures> {
        let How { side, word } = unit.contender.kind;
        let ranks = match unit.case {
            Case::Train { .. } if unit.contender == ONE_RANK => 1,
            Case::Train { .. } => 2,
            Case::Sleep { ranks, .. } => ranks,
        };
        let mut command = self.sides.start(side, ranks, "pipeline");
        command.args(["--how", word]).args(arguments(unit.case, self.steps));
        let printed = child::run(command, LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("it printed `{}`", printed.stdout.trim_end()))
    }

    /// Sleeping hardly changes from one block to the next.
    fn blocks(&self, case: Case, blocks: usize) -> usize {
        if matches!(case, Case::Sleep { .. }) { blocks.min(3) } else { blocks }
    }

    fn check(&self, unit: &UnitOf<Self>, figures: &Figures, tally: &TallyOf<Self>) -> anyhow::Result<()> {
        match tally.all().find(|turn| turn.unit.case == unit.case) {
            Some(turn) => SAME.check(&figures.losses, &turn.figures.losses),
            None => Ok(()),
        }
    }
}

/// What both sides are given for a case.
fn arguments(case: Case, steps: usize) -> Vec<String> {
    let line = match case {
        Case::Train { micro_batches, batch, places } => format!(
            "--schedule 1f1b --micro-batches {micro_batches} --batch {batch} --places {places} --steps {steps}"
        ),
        Case::Sleep { schedule, .. } => format!(
            "--schedule {schedule} --micro-batches {SLEEP_MICRO_BATCHES} --steps {SLEEP_STEPS} --sleep {SLEEP_MS}ms"
        ),
    };
    line.split(' ').map(str::to_owned).collect()
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    Ok(Figures {
        step_ms: line.number("step_ms")?,
        losses: line.numbers("losses").unwrap_or_default(),
        ideal_ms: line.optional("ideal_ms"),
        simulated_ms: line.optional("simulated_ms"),
        hop_ms: line.optional("hop_ms"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_both_sides_are_read() {
        let torch = parse(r#"{"step_ms": 2.5, "losses": [1.0, 0.5]}"#).unwrap();
        assert_eq!((torch.step_ms, torch.losses.len(), torch.ideal_ms), (2.5, 2, None));
        let line = r#"{"step_ms": 530.0, "ideal_ms": 525, "simulated_ms": 527.5, "hop_ms": 0.25}"#;
        let ours = parse(line).unwrap();
        assert_eq!((ours.ideal_ms, ours.simulated_ms, ours.hop_ms), (Some(525.0), Some(527.5), Some(0.25)));
        assert!(ours.losses.is_empty());
        assert!(parse("{\"ideal_ms\": 1}").is_err());
    }

    #[test]
    fn pytorch_takes_part_where_it_is_compared() {
        assert_eq!(units(&cases()).len(), 3 * 4 + 12 + 6 * 2);
        assert_eq!(units(&quick_cases()).len(), 4 + 1 + 2);
        let words = arguments(cases()[8], 9).join(" ");
        assert_eq!(words, "--schedule zbv --micro-batches 32 --steps 3 --sleep 5ms");
        let words = arguments(cases()[0], 9).join(" ");
        assert_eq!(words, "--schedule 1f1b --micro-batches 16 --batch 1 --places 16 --steps 9");
    }
}
