//! Programs as files: the CSV of `torch.distributed.pipelining`.
//!
//! ```text
//!   0F0,0F1,,0B0,0B1          a row for each rank, a cell for each action; an empty cell is idle time, and has no meaning
//!   ,1F0,1B0,1F1,1B1
//! ```
//! PyTorch writes two forms. A file with computations only gets its messages, and its reductions of gradients, from [`lower`]. A
//! file with any message keeps its order; if it has no reduction, it gets those, too. Which rank holds which stage is found out from the cells.

use super::action::{Action, NoSuchAction};
use super::lower::{LowerError, lower, with_reductions};
use super::program::Program;
use super::stage_map::StageMap;

/// A file that is no program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CsvError {
    /// A cell that is no action.
    #[error("line {line}, column {column}: {cause}")]
    Cell {
        /// The line, from 1.
        line: usize,
        /// The cell of the line, from 1.
        column: usize,
        /// What is wrong with it.
        #[source]
        cause: NoSuchAction,
    },
    /// A stage on two ranks.
    #[error(
        "line {line}, column {column}: {action} is of stage {stage}, which rank {holder} has in line {0}; try all of the \
         stage in line {0}",
        holder + 1
    )]
    TwoRanks {
        /// The line, from 1.
        line: usize,
        /// The cell of the line, from 1.
        column: usize,
        /// The action.
        action: Action,
        /// Its stage.
        stage: usize,
        /// The rank that had the stage first.
        holder: usize,
    },
    /// A stage that no rank has.
    #[error(
        "no line has stage {stage}, and there are stages up to {last}; try a line for each rank, and each stage in one"
    )]
    NoRank {
        /// The stage.
        stage: usize,
        /// The last stage that a line has.
        last: usize,
    },
    /// A rank without any stage.
    #[error("line {line} has no action; try a line for each rank, with at least one stage")]
    NoStage {
        /// The line, from 1.
        line: usize,
    },
    /// A number that makes a pipeline larger than the file.
    #[error(
        "line {line}, column {column}: {action} is one of stages and micro-batches that need more forwards than the file \
         has actions, {actions}; try a smaller number"
    )]
    TooLarge {
        /// The line, from 1.
        line: usize,
        /// The cell of the line, from 1.
        column: usize,
        /// The action with the largest number.
        action: Action,
        /// The actions of the file.
        actions: usize,
    },
    /// Nothing to compute.
    #[error("there is no computation; try a line for each rank, such as 0F0,0B0")]
    Empty,
    /// Computations in an order that nobody can carry out.
    #[error(transparent)]
    Order(#[from] LowerError),
}

/// Which actions a file has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CsvForm {
    /// PyTorch's `compute_only`.
    Computations,
    /// PyTorch's `compute_comms`.
    All,
}

/// A cell with its place in the file.
struct Cell {
    line: usize,
    column: usize,
    action: Action,
}

impl Program {
    /// Reads a program from PyTorch's CSV. Lines may be empty only at the end.
    pub fn from_csv(text: &str) -> Result<Self, CsvError> {
        let lines: Vec<_> = text.trim_end().lines().collect();
        let rows: Vec<_> =
            lines.iter().enumerate().map(|(at, line)| cells(at + 1, line)).collect::<Result<_, _>>()?;
        let stages = stage_map(&rows)?;
        let program = Self {
            stages,
            num_micro_batches: extent(&rows).map_or(0, |[_, micro_batches]| micro_batches),
            rows: rows.into_iter().map(|row| row.into_iter().map(|cell| cell.action).collect()).collect(),
        };
        let is_message = |action: &Action| matches!(action, Action::Send(_) | Action::Receive(_));
        let has_messages = program.rows.iter().flatten().any(is_message);
        if has_messages { Ok(with_reductions(program)) } else { Ok(lower(&program)?) }
    }

    /// The program in PyTorch's CSV.
    pub fn to_csv(&self, form: CsvForm) -> String {
        let is_written = |action: &&Action| form == CsvForm::All || action.works().next().is_some();
        let line = |row: &Vec<Action>| {
            let cells: Vec<_> = row.iter().filter(is_written).map(ToString::to_string).collect();
            cells.join(",") + "\n"
        };
        self.rows.iter().map(line).collect()
    }
}

/// The actions of a line.
fn cells(line: usize, text: &str) -> Result<Vec<Cell>, CsvError> {
    let mut row = Vec::new();
    for (at, cell) in text.split(',').enumerate() {
        let column = at + 1;
        let cell = cell.trim();
        // Python's writer quotes nothing that an action consists of; other programs quote all cells.
        let cell = cell.strip_prefix('"').and_then(|cell| cell.strip_suffix('"')).unwrap_or(cell);
        if cell.is_empty() {
            continue;
        }
        let action: Action = cell.parse().map_err(|cause| CsvError::Cell { line, column, cause })?;
        row.push(Cell { line, column, action });
    }
    Ok(row)
}

/// The stages and micro-batches of a file; `None` if they are too many to count.
fn extent(rows: &[Vec<Cell>]) -> Option<[usize; 2]> {
    let parts = || rows.iter().flatten().flat_map(|cell| cell.action.parts());
    let stages = parts().map(|(stage, _)| stage).max()?.checked_add(1)?;
    let micro_batches = parts().filter_map(|(_, micro_batch)| micro_batch).max()?.checked_add(1)?;
    Some([stages, micro_batches])
}

/// A mistyped number is no reason to reserve memory for a billion micro-batches: each needs a forward on each stage.
fn check_extent(rows: &[Vec<Cell>]) -> Result<(), CsvError> {
    let largest =
        |cell: &&Cell| cell.action.parts().map(|(stage, other)| stage.max(other.unwrap_or(0))).max();
    let &Cell { line, column, action } = rows.iter().flatten().max_by_key(largest).ok_or(CsvError::Empty)?;
    if rows.iter().flatten().all(|cell| cell.action.parts().all(|(_, micro_batch)| micro_batch.is_none())) {
        return Err(CsvError::Empty);
    }
    let actions = rows.iter().map(Vec::len).sum();
    // Of two that overlap, one is a forward at most.
    let forwards = extent(rows).and_then(|[stages, micro_batches]| stages.checked_mul(micro_batches));
    let fits = forwards.is_some_and(|forwards| forwards <= actions);
    if fits { Ok(()) } else { Err(CsvError::TooLarge { line, column, action, actions }) }
}

/// Which line has which stage.
fn stage_map(rows: &[Vec<Cell>]) -> Result<StageMap, CsvError> {
    check_extent(rows)?;
    let last = extent(rows).map_or(0, |[stages, _]| stages - 1);
    if let Some(rank) = rows.iter().position(Vec::is_empty) {
        return Err(CsvError::NoStage { line: rank + 1 });
    }
    let mut rank_of = vec![None; last + 1];
    for (rank, row) in rows.iter().enumerate() {
        for &Cell { line, column, action } in row {
            for (stage, _) in action.parts() {
                let holder = *rank_of[stage].get_or_insert(rank);
                if holder != rank {
                    return Err(CsvError::TwoRanks { line, column, action, stage, holder });
                }
            }
        }
    }
    let missing = rank_of.iter().position(Option::is_none);
    let ranks = rank_of.into_iter().collect::<Option<Vec<_>>>();
    let map = ranks.and_then(StageMap::from_ranks);
    map.ok_or(CsvError::NoRank { stage: missing.unwrap_or(last), last })
}

#[cfg(test)]
mod tests {
    use super::super::{PipelineSize, Schedule, verify};
    use super::*;

    #[test]
    fn what_is_read_is_what_was_written() {
        for schedule in Schedule::ALL {
            for (ranks, micro_batches) in [(1, 1), (2, 3), (3, 3), (4, 8)] {
                let size = PipelineSize { ranks, chunks: schedule.default_chunks(), micro_batches };
                let program = schedule.program(size).unwrap();
                // With one rank, a V of two stages is a loop.
                let rows = |program: Program| program.rows;
                let all = Program::from_csv(&program.to_csv(CsvForm::All)).unwrap();
                assert_eq!(all.num_micro_batches, micro_batches);
                assert!(all.stages == program.stages || ranks == 1);
                assert_eq!(rows(all), program.rows, "{schedule}");
                let computations = Program::from_csv(&program.to_csv(CsvForm::Computations)).unwrap();
                assert_eq!(rows(computations), program.rows, "{schedule}");
            }
        }
    }

    #[test]
    fn idle_cells_spaces_and_line_ends_of_others_mean_nothing() {
        let program = Program::from_csv("0F0, 0F1,,0B0,0B1\r\n,\"1F0\",1B0,1F1,1B1\r\n\r\n").unwrap();
        assert_eq!(program.to_csv(CsvForm::Computations), "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
        verify(&program).unwrap();
    }

    #[test]
    fn other_maps_than_loops_and_vs_are_read() {
        // A wave: down, up and down again.
        let text = "0F0,3F0,4F0,4B0,3B0,0B0\n1F0,2F0,5F0,5B0,2B0,1B0\n";
        let program = Program::from_csv(text).unwrap();
        assert_eq!(program.stages, StageMap::Listed(vec![0, 1, 1, 0, 0, 1]));
        verify(&program).unwrap();
        let overlapping = Program::from_csv("0F0,1F0,1F1,(0F1;1B0)OVERLAP_F_B,0B0,1B1,0B1");
        assert!(overlapping.is_err(), "1F1 is before 0F1");
        let text = "0F0,1F0,(0F1;1B0)OVERLAP_F_B,0B0,1F1,1B1,0B1";
        verify(&Program::from_csv(text).unwrap()).unwrap();
    }

    #[test]
    fn gradients_are_reduced_if_a_file_with_messages_does_not_say_so() {
        let is_reduction = |action: &Action| matches!(action, Action::ReduceGrad(_));
        for schedule in Schedule::ALL {
            let size = PipelineSize { ranks: 3, chunks: schedule.default_chunks(), micro_batches: 3 };
            let program = schedule.program(size).unwrap();
            let mut without = program.clone();
            without.rows.iter_mut().for_each(|row| row.retain(|action| !is_reduction(action)));
            let read = Program::from_csv(&without.to_csv(CsvForm::All)).unwrap();
            verify(&read).unwrap();
            for (rank, row) in read.rows.iter().enumerate() {
                let mut stages: Vec<_> = row.iter().filter(|a| is_reduction(a)).map(Action::stage).collect();
                stages.sort_unstable();
                assert_eq!(stages, program.stages.stages_of(rank), "{schedule}");
                let others = row.iter().filter(|action| !is_reduction(action));
                assert!(others.eq(&without.rows[rank]), "{schedule}: the order is the file's");
            }
            // Evaluation has none, and a program that says where keeps its own.
            let forward = program.forward_only();
            assert_eq!(Program::from_csv(&forward.to_csv(CsvForm::All)).unwrap().rows, forward.rows);
        }
        let text = "0F0,0SEND_F0,0RECV_B0,(0F1;0B0)OVERLAP_F_B,0SEND_F1,0RECV_B1,0B1\n\
                    1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n";
        let rows = Program::from_csv(text).unwrap().to_csv(CsvForm::All);
        let [first, second] = text.trim_end().split_once('\n').map(|(a, b)| [a, b]).unwrap();
        assert_eq!(rows, format!("{first},0REDUCE_GRAD\n{second},1REDUCE_GRAD\n"));
    }

    #[test]
    fn errors_name_line_and_column() {
        for (text, expected) in [
            (
                "0F0,0B0\n1F0,,1X0",
                "line 2, column 3: `1X0` is no action of a pipeline; try one like 2F0, 2B0, ",
            ),
            ("0F0,0F1…", "line 1, column 2: `0F1…` is no action of a pipeline; try one like"),
            ("“0F0”,“0B0”", "line 1, column 1: `“0F0”` is no action of a pipeline; try one like"),
            (
                "0F0,0B0,1F0\n1F0,1B0",
                "line 2, column 1: 1F0 is of stage 1, which rank 0 has in line 1; try all of the stage in line 1",
            ),
            (
                "0F0,0B0\n2F0,2B0",
                "no line has stage 1, and there are stages up to 2; try a line for each rank",
            ),
            (
                "0F0,0B0\n,,\n1F0,1B0",
                "line 2 has no action; try a line for each rank, with at least one stage",
            ),
            ("", "there is no computation; try a line for each rank, such as 0F0,0B0"),
            (
                "0F0,0B99999999",
                "line 1, column 2: 0B99999999 is one of stages and micro-batches that need more forwards",
            ),
            ("0F18446744073709551615", "line 1, column 1: 0F18446744073709551615 is one of stages"),
            ("0UNSHARD,9999999999UNSHARD", "there is no computation; try a line"),
            ("0F0,9999999999UNSHARD", "line 1, column 2: 9999999999UNSHARD is one of stages"),
            (
                "0B0,0F0\n1F0,1B0",
                "no rank can continue: action 0 of rank 0 (0B0) waits for the gradients that stage 1 sends",
            ),
        ] {
            let error = Program::from_csv(text).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{text}: {error}");
        }
    }
}
