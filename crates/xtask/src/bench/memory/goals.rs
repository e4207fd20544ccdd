//! The goals: memory within 5 % of its formula, and Adam as fast as memory allows.

use super::contest::{Case, Figures, IN_MEMORY, Memory, TEXTS, TORCH, Word, units};
use crate::bench::contest::{TallyOf, Unit};
use crate::bench::need::Need;
use crate::bench::report::{self, row};
use crate::bench::spread::Spread;

/// GPT-2: rows of its table of tokens, features, blocks.
const ROWS: f64 = 50_304.0;
const FEATURES: f64 = 768.0;
const NUM_BLOCKS: f64 = 12.0;
/// The elements of its largest unit, the table, and of the next one, a block.
const TABLE: f64 = ROWS * FEATURES;
const BLOCK: f64 = 7_087_872.0;

/// The section on goals.
pub(crate) fn section(tally: &TallyOf<Memory>) -> String {
    let mut rows = vec![row!["", "what", "case", "goal", "median of blocks"]];
    for unit in units() {
        match unit.case {
            Case::Adam { .. } if unit.contender == TORCH => {}
            Case::Adam { .. } => {
                let of_loop = tally.spread(unit, |figures| figures.of_loop);
                rows.push(speed(unit, "of the bare loop's rate", Need::AtLeast(0.9), of_loop));
                let torch = Unit { contender: TORCH, ..unit };
                let of_torch = tally.ratio(unit, torch, |ours, torch| Some(ours.of_loop? / torch.of_loop?));
                rows.push(speed(unit, "x parameters/s of PyTorch's", Need::AtLeast(1.0), of_torch));
            }
            _ => rows.push(memory(tally, unit)),
        }
    }
    report::goals(&rows)
}

fn memory(tally: &TallyOf<Memory>, unit: Unit<Case, Word>) -> Vec<String> {
    let ratio = tally.spread(unit, |figures| Some(figures.bytes? / formula(unit, figures)?));
    let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
    let word = match ratio.map(|ratio| ratio.median) {
        Some(ratio) if (0.95..=1.05).contains(&ratio) => "PASS",
        Some(_) => "MISS",
        None => "none",
    };
    row![word, format!("memory, {}, of its formula", unit.contender), unit.case, "0.95 to 1.05", measured]
}

fn formula(unit: Unit<Case, Word>, figures: &Figures) -> Option<f64> {
    match unit.case {
        Case::States { ranks, stage } => {
            Some(states(unit.contender == IN_MEMORY, ranks as f64, stage, figures.parameters))
        }
        Case::Optimizer { which, weights } => Some(of_optimizer(which, weights)? * figures.parameters),
        Case::Kept { how } => kept(how),
        Case::Adam { .. } => None,
    }
}

/// The bytes of all ranks: parameters, gradients and Adam's moments in f32.
fn states(in_memory: bool, ranks: f64, stage: &str, all: f64) -> f64 {
    let slots = 2.0 * 4.0 * BLOCK * ranks;
    let [parameters, gradients] = match stage {
        "1" => [4.0 * all * ranks, 4.0 * all * ranks],
        "2" => [4.0 * all * ranks, 4.0 * all + slots],
        _ => [4.0 * all, 4.0 * all + slots],
    };
    // In files all but two units, the largest ones.
    let state = if in_memory { 8.0 * all } else { 8.0 * (TABLE + BLOCK) };
    parameters + gradients + state
}

/// What an optimizer keeps for a parameter, in bytes.
fn of_optimizer(which: &str, weights: &str) -> Option<f64> {
    let moments = match which {
        "adamw" | "lamb" => 8.0,
        "adamw-bf16" | "lion" => 4.0,
        // Two codes, and two scales for each 256 elements of a row.
        "adamw8bit" => 2.0 + 8.0 / 256.0,
        _ => return None,
    };
    let masters = match weights {
        "copy" => 4.0,
        "split" => 2.0,
        _ => 0.0,
    };
    Some(moments + masters)
}

/// What a forward of GPT-2 keeps, in f32 for each token: the logits, input and result of the last norm, and of each block
/// so many numbers for each of its features.
fn kept(how: &str) -> Option<f64> {
    // Inputs and results of two norms (4), queries, keys, values and their result (4), before and after GELU (8).
    let all = 16.0;
    // The block's input, and the results of its products (3, 1, 4) and of attention.
    let products = 10.0;
    let per_feature = match how {
        "none" => all,
        "full" => 1.0,
        "second" => (all + 1.0) / 2.0,
        "selective" => products,
        _ => return None,
    };
    let [texts, places] = TEXTS;
    let numbers = ROWS + 2.0 * FEATURES + NUM_BLOCKS * per_feature * FEATURES;
    Some(4.0 * numbers * (texts * places) as f64)
}

fn speed(unit: Unit<Case, Word>, what: &str, need: Need, ratio: Option<Spread>) -> Vec<String> {
    let measured = ratio.map_or("not measured".to_owned(), |ratio| ratio.shown(3));
    let word = need.word(ratio.map(|ratio| ratio.median));
    row![word, format!("{}, {what}", unit.contender), unit.case, need.shown("x"), measured]
}

#[cfg(test)]
mod tests {
    use super::super::contest::{ADAMW, ADAMW_BF16, CASES, DRUMLINE, STATE_IN_FILES};
    use super::*;
    use crate::bench::tally::{Tally, Turn};

    #[test]
    fn memory_and_speed_are_judged() {
        let mut tally = Tally::default();
        let mut add = |case, contender, bytes, of_loop| {
            let figures = Figures { bytes, parameters: 124e6, of_loop, ..Figures::default() };
            tally.add(Turn { unit: Unit { case, contender }, block: 0, figures, steady: true });
            section(&tally)
        };
        assert!(add(CASES[0], IN_MEMORY, Some(16.4 * 124e6), None).contains("1 PASS, 0 MISS"));
        let in_files = 8.0 * 124e6 + 8.0 * (TABLE + BLOCK);
        assert!(add(CASES[0], STATE_IN_FILES, Some(in_files), None).contains("2 PASS, 0 MISS"));
        let lion = Case::Optimizer { which: "lion", weights: "f32" };
        assert!(add(lion, DRUMLINE, Some(8.0 * 124e6), None).contains("2 PASS, 1 MISS"));
        let adam = Case::Adam { threads: 2 };
        add(adam, TORCH, None, Some(0.99));
        // Nine tenths of the loop, but not as fast as PyTorch's.
        assert!(add(adam, ADAMW, None, Some(0.91)).contains("3 PASS, 2 MISS"));
        assert!(add(adam, ADAMW_BF16, None, Some(1.0)).contains("5 PASS, 2 MISS"));
    }
}
