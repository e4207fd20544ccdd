//! Makespans, idle shares and peaks of all schedules, as computed from PyTorch 2.11's own lists of actions.
//!
//! A rank's forward, input gradient and weight gradients take 1 each, divided among its stages.

use drumline_plan::pipeline::{PipelineSize, Schedule, StageBytes, StageTimes, Timeline, Times, verify};

use Schedule::{BreadthFirst, GPipe, Interleaved, OneFOneB, ZeroBubble1P, ZeroBubbleV};

const UNIT: StageTimes = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };
const UNEQUAL: StageTimes = StageTimes { forward: 1.0, input: 1.2, weight: 0.8 };
const HOP: f64 = 0.1;

/// What a schedule of a size is expected to give. `None` is not in the table.
struct Row {
    schedule: Schedule,
    chunks: usize,
    makespan: f64,
    idle: f64,
    /// With input gradients of 1.2 and weight gradients of 0.8.
    idle_unequal: Option<f64>,
    /// With hops of 0.1.
    idle_with_hops: Option<f64>,
    /// Of the first and the last rank, in micro-batches of a rank.
    peaks: [f64; 2],
}

fn row(schedule: Schedule, chunks: usize, [makespan, idle]: [f64; 2], peaks: [f64; 2]) -> Row {
    Row { schedule, chunks, makespan, idle, idle_unequal: None, idle_with_hops: None, peaks }
}

impl Row {
    fn unequal(self, idle: f64) -> Self {
        Self { idle_unequal: Some(idle), ..self }
    }

    fn hops(self, idle: f64) -> Self {
        Self { idle_with_hops: Some(idle), ..self }
    }

    fn check(&self, ranks: usize, micro_batches: usize) {
        let size = PipelineSize { ranks, chunks: self.chunks, micro_batches };
        let name =
            format!("{} ({}) of {ranks} ranks, {micro_batches} micro-batches", self.schedule, self.chunks);
        let program = self.schedule.program(size).unwrap();
        let verified = verify(&program).unwrap();
        let run = |rank, hop| verified.simulate(&Times::equal(rank, &program.stages, hop));
        let unit = run(UNIT, 0.0);
        assert!((unit.makespan - self.makespan).abs() < 1e-9, "{name}: {}", unit.makespan);
        assert_eq!(percent(&unit), self.idle, "{name}");
        let unequal = self.idle_unequal.unwrap_or_else(|| percent(&run(UNEQUAL, 0.0)));
        assert_eq!(percent(&run(UNEQUAL, 0.0)), unequal, "{name}, unequal");
        let with_hops = self.idle_with_hops.unwrap_or_else(|| percent(&run(UNIT, HOP)));
        assert_eq!(percent(&run(UNIT, HOP)), with_hops, "{name}, hops");
        let peaks = verified.peaks(&vec![StageBytes::default(); program.stages.num_stages()]);
        let peak = |rank: usize| peaks[rank].activations as f64 / self.chunks as f64;
        assert_eq!([peak(0), peak(ranks - 1)], self.peaks, "{name}");
    }
}

/// The idle share in percent, with one decimal.
fn percent(timeline: &Timeline) -> f64 {
    (timeline.idle_share() * 1000.0).round() / 10.0
}

#[test]
fn four_ranks_and_eight_micro_batches() {
    let rows = [
        row(GPipe, 1, [33.0, 27.3], [8.0, 8.0]).unequal(27.3).hops(28.6),
        row(OneFOneB, 1, [33.0, 27.3], [4.0, 1.0]).unequal(27.3).hops(30.6),
        row(Interleaved, 2, [28.5, 15.8], [5.5, 2.5]).unequal(15.8).hops(19.7),
        row(Interleaved, 4, [26.25, 8.6], [4.75, 3.25]).unequal(8.6).hops(17.9),
        row(BreadthFirst, 2, [28.5, 15.8], [8.0, 8.0]).unequal(15.8).hops(17.5),
        row(ZeroBubble1P, 1, [27.0, 11.1], [4.0, 4.0]).unequal(14.9).hops(14.9),
        row(ZeroBubble1P, 2, [25.5, 5.9], [4.0, 4.0]).unequal(8.0).hops(11.4),
        row(ZeroBubble1P, 4, [24.75, 3.0], [4.0, 4.0]).unequal(4.2).hops(11.6),
        row(ZeroBubbleV, 2, [25.5, 5.9], [4.0, 4.0]).unequal(7.0).hops(10.4),
    ];
    rows.iter().for_each(|row| row.check(4, 8));
}

#[test]
fn four_ranks_and_sixteen_micro_batches() {
    let rows = [
        row(OneFOneB, 1, [57.0, 15.8], [4.0, 1.0]).unequal(15.8).hops(19.7),
        row(Interleaved, 2, [52.5, 8.6], [5.5, 2.5]).unequal(8.6).hops(10.9),
        row(ZeroBubble1P, 1, [51.0, 5.9], [4.0, 4.0]).unequal(8.0).hops(8.0),
        row(ZeroBubbleV, 2, [49.5, 3.0], [4.0, 4.0]).unequal(3.6).hops(5.5),
    ];
    rows.iter().for_each(|row| row.check(4, 16));
}

#[test]
fn eight_ranks_and_thirty_two_micro_batches() {
    let rows = [
        row(OneFOneB, 1, [117.0, 17.9], [8.0, 1.0]).hops(22.5),
        row(Interleaved, 2, [106.5, 9.9], [11.5, 4.5]).hops(12.3),
        row(Interleaved, 4, [101.25, 5.2], [9.75, 6.25]).hops(10.7),
        row(ZeroBubble1P, 1, [103.0, 6.8], [8.0, 8.0]).hops(9.3),
        row(ZeroBubbleV, 2, [99.5, 3.5], [8.0, 8.0]).hops(6.6),
        row(ZeroBubble1P, 4, [97.75, 1.8], [8.0, 8.0]),
    ];
    rows.iter().for_each(|row| row.check(8, 32));
}

#[test]
fn fewer_micro_batches_than_ranks() {
    let rows = [
        row(Interleaved, 2, [15.0, 40.0], [3.0, 2.0]),
        row(ZeroBubbleV, 2, [13.0, 30.8], [2.0, 3.0]),
        row(ZeroBubble1P, 4, [10.75, 16.3], [3.0, 3.0]),
    ];
    rows.iter().for_each(|row| row.check(4, 3));
}

#[test]
fn naive_model_parallelism_uses_one_rank_at_a_time() {
    for ranks in 1..9 {
        let program = GPipe.program(PipelineSize { ranks, chunks: 1, micro_batches: 1 }).unwrap();
        let timeline = verify(&program).unwrap().simulate(&Times::equal(UNIT, &program.stages, 0.0));
        assert_eq!(timeline.makespan, 3.0 * ranks as f64);
        assert!((1.0 - timeline.idle_share() - 1.0 / ranks as f64).abs() < 1e-12);
    }
}

#[test]
fn closed_forms_hold_for_all_sizes() {
    for (ranks, rounds) in [(1, 1), (2, 3), (3, 2), (4, 4), (6, 2)] {
        let m = ranks * rounds;
        let [p, micro_batches] = [ranks, m].map(|number| number as f64);
        let makespan = |schedule: Schedule, chunks| {
            let program = schedule.program(PipelineSize { ranks, chunks, micro_batches: m }).unwrap();
            verify(&program).unwrap().simulate(&Times::equal(UNIT, &program.stages, 0.0)).makespan
        };
        let bubble = |chunks: usize| 3.0 * micro_batches + 3.0 * (p - 1.0) / chunks as f64;
        for chunks in 1..5 {
            for schedule in [Interleaved, BreadthFirst] {
                assert!(
                    (makespan(schedule, chunks) - bubble(chunks)).abs() < 1e-9,
                    "{schedule} {ranks} {chunks}"
                );
            }
        }
        assert_eq!([makespan(GPipe, 1), makespan(OneFOneB, 1)], [bubble(1); 2]);
    }
}
