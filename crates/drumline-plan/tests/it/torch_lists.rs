//! Our programs against PyTorch 2.11's own lists of actions: `bench/oracle/pipelines.py` writes the files.

use std::path::PathBuf;

use drumline_plan::pipeline::{
    CsvForm, PipelineSize, Program, Schedule, StageBytes, StageTimes, Times, verify,
};

fn golden(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../bench/oracle/golden").join(name);
    std::fs::read_to_string(path).unwrap()
}

/// 64-bit FNV-1a.
fn hash(text: &str) -> u64 {
    let step = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    text.bytes().fold(0xcbf2_9ce4_8422_2325, step)
}

#[test]
fn computations_and_messages_are_those_of_pytorch() {
    let mut cases = 0;
    for line in golden("pipelines.txt").lines() {
        let [schedule, ranks, chunks, micro_batches, computations, all] =
            line.split(' ').collect::<Vec<_>>().try_into().unwrap();
        let [ranks, chunks, micro_batches] =
            [ranks, chunks, micro_batches].map(|number| number.parse().unwrap());
        let schedule: Schedule = schedule.parse().unwrap();
        let program = schedule.program(PipelineSize { ranks, chunks, micro_batches }).unwrap();
        let ours = [CsvForm::Computations, CsvForm::All].map(|form| hash(&program.to_csv(form)));
        let theirs = [computations, all].map(|hash| u64::from_str_radix(hash, 16).unwrap());
        assert_eq!(ours, theirs, "{line}");
        cases += 1;
    }
    assert!(cases > 800, "{cases}");
}

#[test]
fn a_file_of_pytorch_is_read_verified_and_simulated() {
    let text = golden("dualpipev.csv");
    let program = Program::from_csv(&text).unwrap();
    assert_eq!(program.to_csv(CsvForm::All), text);
    assert_eq!((program.rows.len(), program.stages.num_stages(), program.num_micro_batches), (4, 8, 8));
    // Messages of computations that overlap leave after both.
    assert_eq!(run(&program, [1.0, 1.0], 0.0), (27.0, 11.1));
    // One after the other, each message leaves after its own.
    let apart =
        program.to_csv(CsvForm::Computations).replace(")OVERLAP_F_B", "").replace('(', "").replace(';', ",");
    let apart = Program::from_csv(&apart).unwrap();
    assert_eq!(run(&apart, [1.0, 1.0], 0.0), (25.5, 5.9));
    assert_eq!(run(&apart, [1.2, 0.8], 0.0).1, 8.0);
    assert_eq!(run(&apart, [1.0, 1.0], 0.1).1, 10.4);
    let peaks = verify(&apart).unwrap().peaks(&[StageBytes::default(); 8]);
    assert_eq!([peaks[0], peaks[3]].map(|peak| peak.activations as f64 / 2.0), [4.5, 4.5]);
}

/// The makespan and the idle share in percent.
fn run(program: &Program, [input, weight]: [f64; 2], hop: f64) -> (f64, f64) {
    let rank = StageTimes { forward: 1.0, input, weight };
    let timeline = verify(program).unwrap().simulate(&Times::equal(rank, &program.stages, hop));
    ((timeline.makespan * 1e6).round() / 1e6, (timeline.idle_share() * 1000.0).round() / 10.0)
}
