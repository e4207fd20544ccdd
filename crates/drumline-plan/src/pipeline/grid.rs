//! A timeline as a grid: a row for each rank, a column for each unit of time.
//!
//! ```text
//!   rank 0  F0 F1 F2 ·  ·  B0─── B1─── B2───
//!   rank 1  ·  F0 F1 F2 B0─── B1─── B2─── ·
//! ```
//! A column is as long as the shortest computation. Where times are no multiples of it, computations begin in the nearest column,
//! and none is hidden.

use std::fmt;

use super::action::Work;
use super::simulate::{Span, Timeline};

/// What a rank does in a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Slot {
    /// Nothing.
    Idle,
    /// It begins a computation.
    Begin(Work),
    /// It continues one.
    Continue(Work),
}

/// What each rank does in each column.
#[derive(Debug, Clone, PartialEq)]
pub struct Grid {
    /// The time of a column.
    pub step: f64,
    /// The columns of each rank; all rows are equally long.
    pub rows: Vec<Vec<Slot>>,
    /// Whether stages are written: where ranks have several.
    pub has_chunks: bool,
    /// The characters of a column, with the space after it.
    width: usize,
}

/// As many columns as a grid has for each computation of the busiest rank, at most.
const COLUMNS_PER_COMPUTATION: f64 = 16.0;

impl Grid {
    /// Draws a timeline.
    pub fn new(timeline: &Timeline) -> Self {
        let step = step(timeline);
        let column = |time| column(step, time);
        let row = |spans: &Vec<Span>| {
            let mut row = Vec::new();
            for span in spans {
                let start = column(span.start).max(row.len());
                row.resize(start, Slot::Idle);
                row.push(Slot::Begin(span.work));
                row.resize(column(span.end).max(start + 1), Slot::Continue(span.work));
            }
            row
        };
        let mut rows: Vec<_> = timeline.ranks.iter().map(row).collect();
        let longest = rows.iter().map(Vec::len).max().unwrap_or(0);
        rows.iter_mut().for_each(|row| row.resize(longest, Slot::Idle));
        let stages = |spans: &Vec<Span>| spans.iter().any(|span| span.work.stage != spans[0].work.stage);
        let grid = Self { step, rows, has_chunks: timeline.ranks.iter().any(stages), width: 0 };
        let labels = grid.rows.iter().flatten().map(|slot| match slot {
            Slot::Begin(work) => grid.label(*work).len(),
            _ => 1,
        });
        let width = labels.max().unwrap_or(1) + 1;
        Self { width, ..grid }
    }

    /// The columns that the grid of a timeline has, without drawing it.
    pub fn num_columns(timeline: &Timeline) -> usize {
        let step = step(timeline);
        let length = |spans: &Vec<Span>| {
            spans.iter().fold(0, |length: usize, span| {
                column(step, span.end).max(column(step, span.start).max(length) + 1)
            })
        };
        timeline.ranks.iter().map(length).max().unwrap_or(0)
    }

    /// What is written where a computation begins: `F0`, or with its stage `2F0` where ranks have several.
    pub fn label(&self, work: Work) -> String {
        if self.has_chunks {
            work.to_string()
        } else {
            format!("{}{}", work.compute.letter(), work.micro_batch)
        }
    }

    /// The characters of a column, with the space after it.
    pub fn width(&self) -> usize {
        self.width
    }

    /// The text of a column of a rank, as wide as [`width`](Self::width).
    pub fn cell(&self, rank: usize, column: usize) -> String {
        let row = &self.rows[rank];
        let continues = matches!(row.get(column + 1), Some(Slot::Continue(_)));
        let text = match row[column] {
            Slot::Idle => "·".to_owned(),
            Slot::Begin(work) => self.label(work),
            Slot::Continue(_) => "─".repeat(self.width() - 1),
        };
        let fill = if continues { "─" } else { " " };
        let missing = self.width() - text.chars().count();
        text + &fill.repeat(missing)
    }
}

/// The column in which a time is.
fn column(step: f64, time: f64) -> usize {
    if step > 0.0 { (time / step).round() as usize } else { 0 }
}

/// The shortest computation, unless the grid would be very long.
fn step(timeline: &Timeline) -> f64 {
    let spans = timeline.ranks.iter().flatten();
    let shortest =
        spans.map(|span| span.end - span.start).filter(|time| *time > 0.0).fold(f64::INFINITY, f64::min);
    let most = timeline.ranks.iter().map(Vec::len).max().unwrap_or(0) as f64 * COLUMNS_PER_COMPUTATION;
    if shortest.is_finite() { shortest.max(timeline.makespan / most) } else { 0.0 }
}

/// All columns, a line for each rank.
impl fmt::Display for Grid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = self.rows.len().saturating_sub(1).to_string().len();
        for rank in 0..self.rows.len() {
            let cells: String = (0..self.rows[rank].len()).map(|column| self.cell(rank, column)).collect();
            writeln!(f, "rank {rank:>digits$}  {}", cells.trim_end())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{PipelineSize, Schedule, StageTimes, Times, verify};
    use super::*;

    fn grid(schedule: Schedule, size: PipelineSize, rank: StageTimes) -> Grid {
        let program = schedule.program(size).unwrap();
        Grid::new(&verify(&program).unwrap().simulate(&Times::equal(rank, &program.stages, 0.0)))
    }

    const UNIT: StageTimes = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };

    #[test]
    fn each_column_is_a_unit_of_time() {
        let size = PipelineSize { ranks: 2, chunks: 1, micro_batches: 3 };
        let text = "\
rank 0  F0 F1 F2 ·  ·  ·  B0─── B1─── B2───
rank 1  ·  F0 F1 F2 B0─── B1─── B2─── ·  ·
";
        assert_eq!(grid(Schedule::GPipe, size, UNIT).to_string(), text);
    }

    #[test]
    fn stages_are_written_where_ranks_have_several() {
        let size = PipelineSize { ranks: 2, chunks: 2, micro_batches: 1 };
        let text = "\
rank 0  0F0 ·   ·   3F0 3I0 3W0 ·   ·   0I0 0W0
rank 1  ·   1F0 2F0 ·   ·   2I0 2W0 1I0 1W0 ·
";
        assert_eq!(grid(Schedule::ZeroBubbleV, size, UNIT).to_string(), text);
    }

    #[test]
    fn no_computation_is_hidden() {
        let size = PipelineSize { ranks: 3, chunks: 1, micro_batches: 5 };
        for rank in [
            StageTimes { forward: 0.7, input: 1.3, weight: 0.31 },
            StageTimes { forward: 0.001, input: 5.0, weight: 0.0 },
            StageTimes { forward: 0.0, input: 0.0, weight: 0.0 },
        ] {
            let program = Schedule::ZeroBubble1P.program(size).unwrap();
            let timeline = verify(&program).unwrap().simulate(&Times::equal(rank, &program.stages, 0.0));
            let (grid, num_columns) = (Grid::new(&timeline), Grid::num_columns(&timeline));
            for row in &grid.rows {
                let begun = row.iter().filter(|slot| matches!(slot, Slot::Begin(_))).count();
                assert_eq!((begun, row.len()), (15, num_columns));
            }
            assert!(grid.rows[0].len() <= 16 * 15 + 15, "{}", grid.rows[0].len());
        }
    }
}
