//! Four changed lines, and the same result: by the plain loop, by one process, and by two.

use std::process::Command;

use drumline_launch::{LocalJob, Output};

use super::started::{Data, LONGEST, numbers_after};

const PLAIN: &str = include_str!("../../src/bin/plain_loop.rs");
const ACCELERATED: &str = include_str!("../../src/bin/accelerated.rs");

/// The lines of `main` and `train`.
fn main_of(program: &str) -> Vec<&str> {
    program.lines().skip_while(|line| !line.starts_with("fn main")).collect()
}

#[test]
fn four_lines_differ() {
    let (plain, accelerated) = (main_of(PLAIN), main_of(ACCELERATED));
    let new: Vec<_> =
        accelerated.iter().filter(|line| !plain.contains(line)).map(|line| line.trim()).collect();
    let expected =
        ["let accelerator", "let device", "let (model, mut optimizer, loader)", "accelerator.backward"];
    assert_eq!(new.len(), expected.len(), "{new:?}");
    assert!(new.iter().zip(expected).all(|(line, begin)| line.starts_with(begin)), "{new:?}");
    // What is left is the same, in the same order.
    let kept = |lines: &[&'static str], others: &[&str]| -> Vec<&str> {
        lines.iter().copied().filter(|line| others.contains(line)).collect()
    };
    assert_eq!(kept(&plain, &accelerated), kept(&accelerated, &plain));
}

/// The norms of the weights after each epoch, which the master logs; the others say nothing.
fn as_ranks(ranks: usize, args: Vec<String>) -> Vec<f64> {
    let job = LocalJob::new(ranks, env!("CARGO_BIN_EXE_accelerated"), args).env("OMP_NUM_THREADS", "1");
    let report = job.output(Output::Capture).deadline(LONGEST).start().unwrap().wait();
    assert!(report.is_success(), "{report}");
    assert!(report.ranks[1..].iter().all(|rank| rank.stderr_text().is_empty()), "{report}");
    numbers_after(&report.ranks[0].stderr_text(), "weights: ")
}

/// The same of a program without a launcher.
fn alone(program: &str, args: Vec<String>) -> Vec<f64> {
    let mut command = Command::new("timeout");
    let command = command.arg(LONGEST.as_secs().to_string()).arg(program).args(args);
    let output = command.env_remove("RANK").env("OMP_NUM_THREADS", "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    numbers_after(&said, "weights: ")
}

#[test]
fn one_process_and_two_come_to_the_weights_of_the_plain_loop() {
    // 100 images are no multiple of the batch: the last step is a short one.
    let data = Data::new(100, 1);
    let args = |batch: usize| data.args(&format!("--arch mlp --epochs 3 --batch-size {batch}"));
    let plain = alone(env!("CARGO_BIN_EXE_plain_loop"), args(32));
    assert_eq!(plain.len(), 3);
    assert_eq!(alone(env!("CARGO_BIN_EXE_accelerated"), args(32)), plain, "the same bits without a launcher");
    assert_eq!(as_ranks(1, args(32)), plain, "the same bits with one");
    let near = |one: &[f64], two: &[f64]| one.iter().zip(two).all(|(one, two)| (one - two).abs() < 1e-5);
    let two = as_ranks(2, args(16));
    assert!(two.len() == 3 && near(&plain, &two), "{plain:?} and {two:?}");
    // The control: another step is another training.
    let other = as_ranks(2, args(32));
    assert!(!near(&plain, &other), "{plain:?} and {other:?}");
}
