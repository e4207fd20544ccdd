//! The searched schedule against the named ones, on stages of a GPT-2 with a vocabulary of 50,000.
//!
//! Its output layer costs as much as 5.4 of its 12 blocks, and is a stage's part that cannot be divided. Cut by cost, four stages
//! have 4 blocks each, and the last one has the output layer alone: it takes 1.35 times as long as the others, and keeps logits.

use drumline_plan::pipeline::{Search, StageBytes, StageMap, StageTimes, Times, verify};

/// A stage of 4 blocks.
const BLOCKS: StageTimes = StageTimes { forward: 1.0, input: 1.1, weight: 0.9 };
const HEAD: StageTimes = StageTimes { forward: 1.35, input: 1.35, weight: 1.35 };
/// In units of a stage's input.
const BLOCKS_BYTES: StageBytes = StageBytes { state: 0, activations: 64, weight_inputs: 48, input: 1 };
const HEAD_BYTES: StageBytes = StageBytes { state: 0, activations: 70, weight_inputs: 66, input: 1 };

fn search(num_micro_batches: usize, limit: u64) -> Search {
    Search {
        stages: StageMap::Loop { ranks: 4, chunks: 1 },
        num_micro_batches,
        times: Times { stages: vec![BLOCKS, BLOCKS, BLOCKS, HEAD], hop: 0.02 },
        bytes: vec![BLOCKS_BYTES, BLOCKS_BYTES, BLOCKS_BYTES, HEAD_BYTES],
        limit,
        seed: 1,
        changes: 3000,
    }
}

#[test]
fn it_is_shorter_than_named_schedules_in_the_same_memory() {
    // What 1F1B needs on the first rank.
    let limit = 4 * 64 + 8;
    for num_micro_batches in [4, 8] {
        let found = search(num_micro_batches, limit).run().unwrap();
        let (schedule, named) = found.best_named.unwrap();
        println!(
            "{num_micro_batches} micro-batches: {:.2}, {schedule} {named:.2}: {:.1} % shorter",
            found.makespan,
            100.0 * (1.0 - found.makespan / named)
        );
        assert!(found.makespan <= 0.95 * named, "{} of {named} ({schedule})", found.makespan);
        assert!(found.peaks.iter().all(|peak| peak.bytes <= limit), "{:?}", found.peaks);
        let verified = verify(&found.program).unwrap();
        assert_eq!(verified.simulate(&search(num_micro_batches, limit).times).makespan, found.makespan);
        // The last rank cannot begin before three forwards and hops, nor end before all of its work.
        let bound = 3.0 * (1.0 + 0.02) + num_micro_batches as f64 * 3.0 * 1.35;
        assert!(found.makespan >= bound - 1e-9, "{} and {bound}", found.makespan);
    }
}

#[test]
fn with_any_memory_it_is_no_longer_than_the_best_named_schedule() {
    for num_micro_batches in [4, 8] {
        let found = search(num_micro_batches, u64::MAX).run().unwrap();
        let (schedule, named) = found.best_named.unwrap();
        println!(
            "{num_micro_batches} micro-batches, any memory: {:.2}, {schedule} {named:.2}",
            found.makespan
        );
        assert!(found.makespan <= named, "{} of {named} ({schedule})", found.makespan);
    }
}

#[test]
fn the_seed_decides() {
    let run = |seed| Search { seed, changes: 300, ..search(5, 300) }.run().unwrap();
    assert_eq!(run(7).program.fingerprint(), run(7).program.fingerprint());
}

#[test]
fn less_memory_is_respected_and_too_little_is_an_error() {
    for limit in [80, 140, 200, 1000] {
        let found = Search { changes: 100, ..search(4, limit) }.run().unwrap();
        assert!(found.peaks.iter().all(|peak| peak.bytes <= limit), "{limit}: {:?}", found.peaks);
    }
    let error = search(4, 70).run().unwrap_err();
    assert_eq!((error.rank, error.needed, error.limit), (3, 71, 70));
    assert!(
        error.to_string().starts_with("rank 3 needs 71 bytes for one micro-batch at a time, and has 70; try")
    );
}

#[test]
fn other_maps_are_searched_too() {
    for stages in [
        StageMap::V { ranks: 2 },
        StageMap::Loop { ranks: 2, chunks: 2 },
        StageMap::Listed(vec![0, 1, 1, 0, 0, 1]),
    ] {
        let count = stages.num_stages();
        let found = Search {
            times: Times::equal(BLOCKS, &stages, 0.0),
            bytes: vec![BLOCKS_BYTES; count],
            stages,
            changes: 200,
            ..search(4, 600)
        };
        let found = found.run().unwrap();
        verify(&found.program).unwrap();
        assert!(found.best_named.is_none_or(|(_, named)| found.makespan <= named));
    }
}
