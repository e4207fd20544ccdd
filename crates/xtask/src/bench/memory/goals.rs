//! The goals: memory within 5 % of its formula, and Adam as fast as memory allows.

use super::contest::{BARE_LOOP, Case, Figures, IN_MEMORY, Memory, OURS, TORCH, Word, units};
use crate::bench::contender::Contender;
use crate::bench::contest::{TallyOf, Unit};
use crate::bench::need::Need;
use crate::bench::report::{self, row};

/// The elements of GPT-2's largest unit, the table of tokens, and of the next one, a block.
const TABLE: f64 = 50_304.0 * 768.0;
const BLOCK: f64 = 7_087_872.0;

/// The section on goals.
pub(crate) fn section(tally: &TallyOf<Memory>) -> String {
    let mut rows = vec![row!["", "what", "case", "goal", "median of blocks"]];
    for unit in units() {
        match unit.case {
            Case::States { .. } => rows.push(memory(tally, unit)),
            Case::Adam { .. } if unit.contender == OURS => {
                rows.push(speed(tally, unit, BARE_LOOP, 0.9));
                rows.push(speed(tally, unit, TORCH, 1.0));
            }
            Case::Adam { .. } => {}
        }
    }
    report::goals(&rows)
}

fn memory(tally: &TallyOf<Memory>, unit: Unit<Case, Word>) -> Vec<String> {
    let ratio = tally.spread(unit, |figures| Some(figures.pss_bytes? / formula(unit, figures)?));
    let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
    let word = match ratio.map(|ratio| ratio.median) {
        Some(ratio) if (0.95..=1.05).contains(&ratio) => "PASS",
        Some(_) => "MISS",
        None => "none",
    };
    row![word, format!("memory, {}, of its formula", unit.contender), unit.case, "0.95 to 1.05", measured]
}

/// The bytes of all ranks: parameters, gradients and Adam's moments in f32.
fn formula(Unit { case, contender }: Unit<Case, Word>, figures: &Figures) -> Option<f64> {
    let Case::States { ranks, stage } = case else { return None };
    let (ranks, all) = (ranks as f64, figures.parameters);
    let slots = 2.0 * 4.0 * BLOCK * ranks;
    let [parameters, gradients] = match stage {
        "1" => [4.0 * all * ranks, 4.0 * all * ranks],
        "2" => [4.0 * all * ranks, 4.0 * all + slots],
        _ => [4.0 * all, 4.0 * all + slots],
    };
    // In files all but two units, the largest ones.
    let state = if contender == IN_MEMORY { 8.0 * all } else { 8.0 * (TABLE + BLOCK) };
    Some(parameters + gradients + state)
}

fn speed(tally: &TallyOf<Memory>, ours: Unit<Case, Word>, other: Contender<Word>, least: f64) -> Vec<String> {
    let other_unit = Unit { contender: other, ..ours };
    let ratio = tally.ratio(ours, other_unit, |ours, other| Some(other.optimizer_ms / ours.optimizer_ms));
    let need = Need::AtLeast(least);
    let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
    row![
        need.word(ratio.map(|ratio| ratio.median)),
        format!("{} against {other}", ours.contender),
        ours.case,
        need.shown("x its parameters/s"),
        measured
    ]
}

#[cfg(test)]
mod tests {
    use super::super::contest::{CASES, STATE_IN_FILES};
    use super::*;
    use crate::bench::tally::{Tally, Turn};

    #[test]
    fn memory_and_speed_are_judged() {
        let mut tally = Tally::default();
        let mut add = |case, contender, pss_bytes, optimizer_ms| {
            let figures = Figures { pss_bytes, parameters: 124e6, optimizer_ms, losses: Vec::new() };
            tally.add(Turn { unit: Unit { case, contender }, block: 0, figures, steady: true });
            section(&tally)
        };
        assert!(add(CASES[0], IN_MEMORY, Some(16.4 * 124e6), 1.0).contains("1 PASS, 0 MISS"));
        let in_files = 8.0 * 124e6 + 8.0 * (TABLE + BLOCK);
        assert!(add(CASES[0], STATE_IN_FILES, Some(in_files), 1.0).contains("2 PASS, 0 MISS"));
        add(CASES[4], OURS, None, 10.0);
        assert!(add(CASES[4], TORCH, None, 9.0).contains("2 PASS, 1 MISS"));
        assert!(add(CASES[4], BARE_LOOP, None, 9.1).contains("3 PASS, 1 MISS"));
    }
}
