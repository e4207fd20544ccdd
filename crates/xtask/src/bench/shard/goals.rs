//! The goals: times against our own DDP and FSDP2 by the medians of ratios within a block, memory against formulas.

use super::training::{
    Case, DDP, FSDP, FSDP_KEPT, FSDP_TUNED, Figures, How, OURS_ALONE, TORCH_ALONE, TORCH_DDP, Training,
    ZERO_1, ZERO_2, ZERO_3,
};
use crate::bench::contender::Contender;
use crate::bench::contest::{TallyOf, Unit};
use crate::bench::need::Need;
use crate::bench::report::{self, row};
use crate::bench::step_goal::StepGoal;

/// The elements of the largest unit of `gpt2` that is not a table: a block.
const BLOCK: f64 = 7_087_872.0;

const GOALS: [StepGoal<How>; 6] = [
    StepGoal { ours: ZERO_3, other: DDP, need: Need::AtMost(1.0) },
    StepGoal { ours: ZERO_3, other: FSDP, need: Need::AtLeast(2.0) },
    StepGoal { ours: ZERO_3, other: FSDP_TUNED, need: Need::AtLeast(2.0) },
    StepGoal { ours: ZERO_3, other: FSDP_KEPT, need: Need::Shown },
    StepGoal { ours: ZERO_3, other: TORCH_DDP, need: Need::Shown },
    StepGoal { ours: ZERO_3, other: OURS_ALONE, need: Need::Shown },
];

/// The section on goals.
pub(crate) fn section(tally: &TallyOf<Training>, cases: &[Case]) -> String {
    let mut rows = vec![row!["", "what", "case", "goal", "median of blocks"]];
    for case in cases.iter().filter(|case| !case.is_weighed) {
        rows.extend(GOALS.iter().map(|goal| goal.judge::<Training>(tally, *case, |figures| figures.step_ms)));
        rows.push(communication(tally, *case));
    }
    for case in cases.iter().filter(|case| case.is_weighed) {
        rows.extend([DDP, ZERO_1, ZERO_2, ZERO_3].map(|stage| memory(tally, *case, stage)));
    }
    report::goals(&rows)
}

/// What communication adds to a step, FSDP2's against ours.
fn communication(tally: &TallyOf<Training>, case: Case) -> Vec<String> {
    let added = |with, without| {
        let [with, without] = [with, without].map(|contender| Unit { case, contender });
        tally.ratio(with, without, |with, without| Some(with.step_ms - without.step_ms))
    };
    let added = added(ZERO_3, OURS_ALONE).zip(added(FSDP_TUNED, TORCH_ALONE));
    // Less than a millisecond cannot be distinguished from none.
    let ratio = added.map(|(ours, theirs)| theirs.median / ours.median.max(1.0));
    let need = Need::AtLeast(10.0);
    let measured = added.zip(ratio).map_or("not measured".to_owned(), |((ours, theirs), ratio)| {
        format!("{ratio:.1}: it adds {} ms, ours {} ms", theirs.shown(1), ours.shown(1))
    });
    row![
        need.word(ratio),
        "communication of ZeRO-3 against FSDP2 tuned",
        case,
        need.shown("x less"),
        measured
    ]
}

/// Memory of all ranks against the stage's formula, for f32 and Adam.
fn memory(tally: &TallyOf<Training>, case: Case, stage: Contender<How>) -> Vec<String> {
    let unit = Unit { case, contender: stage };
    let ratio = tally.spread(unit, |figures| Some(figures.pss_bytes / formula(case, stage, figures)?));
    let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
    let word = match ratio.map(|ratio| ratio.median) {
        Some(ratio) if (0.97..=1.03).contains(&ratio) => "PASS",
        Some(_) => "MISS",
        None => "none",
    };
    row![word, format!("memory of {stage}, of its formula"), case, "0.97 to 1.03", measured]
}

fn formula(case: Case, stage: Contender<How>, figures: &Figures) -> Option<f64> {
    let (parameters, ranks) = (figures.parameters?, case.ranks as f64);
    let slots = 2.0 * 4.0 * BLOCK * ranks;
    Some(match stage {
        DDP => 16.0 * parameters * ranks,
        ZERO_1 => (8.0 * ranks + 8.0) * parameters,
        ZERO_2 => (4.0 * ranks + 12.0) * parameters + slots,
        _ => 16.0 * parameters + slots,
    })
}

#[cfg(test)]
mod tests {
    use super::super::training::CASES;
    use super::*;
    use crate::bench::tally::{Tally, Turn};

    #[test]
    fn times_and_memory_are_judged() {
        let mut tally = Tally::default();
        let mut add = |case, contender, step_ms, pss_bytes| {
            let figures = Figures { step_ms, losses: Vec::new(), pss_bytes, parameters: Some(1e9) };
            tally.add(Turn { unit: Unit { case, contender }, block: 0, figures, steady: true });
            section(&tally, &CASES)
        };
        add(CASES[0], DDP, 100.0, 0.0);
        add(CASES[0], FSDP, 250.0, 0.0);
        assert!(add(CASES[0], ZERO_3, 100.0, 0.0).contains("2 PASS, 0 MISS"));
        assert!(add(CASES[2], DDP, 1.0, 32.5e9).contains("3 PASS, 0 MISS"));
        assert!(add(CASES[3], DDP, 1.0, 60e9).contains("3 PASS, 1 MISS"));
    }
}
