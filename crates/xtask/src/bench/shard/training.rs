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
const SAME: SameLosses = SameLosses { tolerance: 1e-3, steps: usize::MAX };

/// How a contender trains: with a stage of ours, or in PyTorch's way of this name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct How {
    side: Side,
    how: &'static str,
}

type Trainer = Contender<How>;

const fn ours(name: &'static str, how: &'static str) -> Trainer {
    Contender::new(name, How { side: Side::Ours, how })
}

const fn torch(name: &'static str, side: Side, how: &'static str) -> Trainer {
    Contender::new(name, How { side, how })
}

pub(crate) const DDP: Trainer = ours("Drumline DDP", "0");
pub(crate) const ZERO_1: Trainer = ours("Drumline ZeRO-1", "1");
pub(crate) const ZERO_2: Trainer = ours("Drumline ZeRO-2", "2");
pub(crate) const ZERO_3: Trainer = ours("Drumline ZeRO-3", "3");
/// Ranks that share nothing but the machine, and step as many parameters as those of ZeRO-3.
pub(crate) const OURS_ALONE: Trainer = ours("Drumline without communication", "alone");
pub(crate) const FSDP: Trainer = torch("PyTorch FSDP2", Side::Torch, "fsdp");
pub(crate) const FSDP_TUNED: Trainer = torch("PyTorch FSDP2 tuned", Side::TorchTuned, "fsdp");
/// Not as little memory as ZeRO-3's: parameters stay from forward to backward.
pub(crate) const FSDP_KEPT: Trainer =
    torch("PyTorch FSDP2 tuned, parameters kept", Side::TorchTuned, "fsdp-kept");
pub(crate) const TORCH_DDP: Trainer = torch("PyTorch DDP tuned", Side::TorchTuned, "ddp");
pub(crate) const TORCH_ALONE: Trainer =
    torch("PyTorch tuned, without communication", Side::TorchTuned, "alone");
pub(crate) const ALL: [Trainer; 10] =
    [DDP, ZERO_1, ZERO_2, ZERO_3, OURS_ALONE, FSDP, FSDP_TUNED, FSDP_KEPT, TORCH_DDP, TORCH_ALONE];

/// The model, and the ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Case {
    pub(crate) size: &'static str,
    pub(crate) ranks: usize,
    batch: usize,
    places: usize,
    /// Whether only memory counts: freed memory is not kept, there may be more ranks than cores, and a batch is one token, as
    /// malloc and MKL keep up to 20 MB of each rank's activations for later.
    pub(crate) is_weighed: bool,
}

const fn case(size: &'static str, ranks: usize, batch: usize, places: usize, is_weighed: bool) -> Case {
    Case { size, ranks, batch, places, is_weighed }
}

pub(crate) const CASES: [Case; 5] = [
    case("mini", 2, 4, 128, false),
    case("gpt2", 2, 1, 128, false),
    case("gpt2", 2, 1, 1, true),
    case("gpt2", 3, 1, 1, true),
    case("gpt2", 4, 1, 1, true),
];

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { size, ranks, batch, places, is_weighed } = self;
        let what = if *is_weighed { "memory" } else { "time" };
        write!(f, "{size}, {ranks} ranks, {batch} x {places}, {what}")
    }
}

/// What a turn gave.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Figures {
    pub(crate) step_ms: f64,
    pub(crate) losses: Vec<f64>,
    pub(crate) pss_bytes: f64,
    /// Of ours: the number of parameters.
    pub(crate) parameters: Option<f64>,
}

/// The contest.
#[derive(Debug)]
pub(crate) struct Training {
    pub(crate) sides: Sides,
    pub(crate) steps: usize,
}

impl Contest for Training {
    type Case = Case;
    type Kind = How;
    type Figures = Figures;

    fn contenders(&self, case: Case) -> Vec<Trainer> {
        // What is tuned keeps freed memory.
        let can_be_weighed =
            |trainer: &Trainer| trainer.kind.side != Side::TorchTuned && *trainer != OURS_ALONE;
        let is_wanted = |trainer: &Trainer| !case.is_weighed || can_be_weighed(trainer);
        ALL.into_iter().filter(is_wanted).collect()
    }

    fn measure(&self, unit: &UnitOf<Self>) -> anyhow::Result<Figures> {
        let Case { size, ranks, batch, places, is_weighed } = unit.case;
        let How { side, how } = unit.contender.kind;
        let mut command = self.sides.start(side, ranks, "shard");
        let steps = if is_weighed { self.steps.min(2) } else { self.steps };
        let numbers = [batch, places, steps].map(|number| number.to_string());
        command.args(["--how", how, "--size", size]);
        command.args(["--batch", &numbers[0], "--places", &numbers[1], "--steps", &numbers[2]]);
        if is_weighed {
            // Freed memory goes back to the system, so that only what is used counts.
            command.env("MALLOC_MMAP_THRESHOLD_", "131072").env("MALLOC_TRIM_THRESHOLD_", "131072");
        }
        if is_weighed && side == Side::Ours {
            command.arg("--weigh");
        }
        let printed = child::run(command, LIMIT)?;
        parse(&printed.stdout).with_context(|| format!("it printed `{}`", printed.stdout.trim_end()))
    }

    /// Memory hardly changes from one block to the next.
    fn blocks(&self, case: Case, blocks: usize) -> usize {
        if case.is_weighed { blocks.min(2) } else { blocks }
    }

    /// All must train the same, but for those that do not communicate.
    fn check(&self, unit: &UnitOf<Self>, figures: &Figures, tally: &TallyOf<Self>) -> anyhow::Result<()> {
        let is_alone = |trainer: Trainer| [OURS_ALONE, TORCH_ALONE].contains(&trainer);
        let reference =
            tally.all().find(|turn| turn.unit.case == unit.case && !is_alone(turn.unit.contender));
        match reference {
            Some(turn) if !is_alone(unit.contender) => SAME.check(&figures.losses, &turn.figures.losses),
            _ => Ok(()),
        }
    }
}

fn parse(stdout: &str) -> anyhow::Result<Figures> {
    let line = JsonLine::find(stdout)?;
    Ok(Figures {
        step_ms: line.number("step_ms")?,
        losses: line.numbers("losses")?,
        pss_bytes: line.number("pss_bytes")?,
        parameters: line.optional("parameters"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_must_have_all_figures() {
        let line = r#"{"step_ms": 2.5, "losses": [1.0, 0.5], "pss_bytes": 7}"#;
        assert_eq!(parse(line).unwrap().pss_bytes, 7.0);
        assert!(parse("{\"step_ms\": 1}").is_err());
    }

    #[test]
    fn tuned_contenders_are_not_weighed() {
        let contest = Training { sides: Sides::default(), steps: 2 };
        let names = |case: Case| contest.contenders(case).into_iter().map(|one| one.name).collect::<Vec<_>>();
        assert_eq!(names(CASES[0]).len(), ALL.len());
        let weighed = names(CASES[2]);
        assert_eq!(
            weighed,
            ["Drumline DDP", "Drumline ZeRO-1", "Drumline ZeRO-2", "Drumline ZeRO-3", "PyTorch FSDP2"]
        );
    }
}
