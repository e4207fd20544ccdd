//! A pipeline of 256 ranks and 1024 micro-batches; without optimization, of a quarter of both. How long it takes is printed:
//! `cargo test --release -p drumline-plan --test it large -- --nocapture`.

use std::time::Instant;

use drumline_plan::pipeline::{PipelineSize, Schedule, StageBytes, StageTimes, Times, verify};

#[test]
fn large_programs_are_verified() {
    let rank = StageTimes { forward: 1.0, input: 1.0, weight: 1.0 };
    for schedule in [Schedule::OneFOneB, Schedule::ZeroBubble1P] {
        let [ranks, micro_batches] = if cfg!(debug_assertions) { [64, 256] } else { [256, 1024] };
        let started = Instant::now();
        let program = schedule.program(PipelineSize { ranks, chunks: 1, micro_batches }).unwrap();
        let generated = started.elapsed();
        let verified = verify(&program).unwrap();
        let checked = started.elapsed() - generated;
        let timeline = verified.simulate(&Times::equal(rank, &program.stages, 0.0));
        let peaks = verified.peaks(&vec![StageBytes::default(); ranks]);
        let actions: usize = program.rows.iter().map(Vec::len).sum();
        println!(
            "{schedule}, {ranks} ranks, {micro_batches} micro-batches, {actions} actions: generated in {generated:.2?}, \
             verified in {checked:.2?}, simulated in {:.2?}",
            started.elapsed() - generated - checked
        );
        assert_eq!(peaks[0].activations, ranks);
        let expected = match schedule {
            Schedule::OneFOneB => 3.0 * micro_batches as f64 + 3.0 * (ranks - 1) as f64,
            _ => 3.0 * micro_batches as f64 + (ranks - 1) as f64,
        };
        assert_eq!(timeline.makespan, expected);
    }
}
