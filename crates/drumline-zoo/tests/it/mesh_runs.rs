//! `drumline-train` with `PARALLEL.TP` and `PARALLEL.CP`: the losses of one rank, resume and test on another mesh, export,
//! parity, and what cannot be.

use drumline_text::synth_story::SynthStoryOptions;
use tch::Tensor;

use super::running::{Place, assert_same_figures, column, ended, start};

const STORIES: SynthStoryOptions = SynthStoryOptions { train: 24, valid: 6, seed: 3 };
const STEPS: &str =
    "OPTIM.MAX_EPOCH 4 OPTIM.SCHEDULE constant OPTIM.WARMUP 0 TRAIN.PRINT_FREQ 1 TRAIN.SAVE_FREQ 2";

/// The losses of steps and evaluations.
pub(super) fn losses(place: &Place) -> Vec<f64> {
    let events = place.events();
    [column(&events, "step", "loss"), column(&events, "eval", "loss")].concat()
}

/// The line of a test, without the path of the checkpoint.
pub(super) fn tested(place: &Place, nproc: usize, more: &str) -> String {
    let said = place.passes(nproc, &format!("test --last TEST.BATCH_SIZE 3 {more}"));
    let line = said.lines().find(|line| line.contains("== test:")).unwrap();
    line.split("| last model").next().unwrap().to_owned()
}

#[track_caller]
pub(super) fn assert_close(one: &[f64], other: &[f64], what: &str) {
    assert!(one.len() > 3 && one.len() == other.len(), "{what}: {one:?}, {other:?}");
    let furthest = one.iter().zip(other).map(|(a, b)| (a - b).abs() / a.abs()).fold(0.0, f64::max);
    assert!(furthest < 1e-4, "{what}: {one:?}, {other:?}");
}

#[test]
fn runs_on_meshes_have_the_losses_of_one_rank_and_resume_on_others() {
    let words = |batch: usize, more: &str| {
        format!("train {STEPS} TRAIN.BATCH_SIZE {batch} TEST.BATCH_SIZE 3 MODEL.DROPOUT 0.1 {more}")
    };
    let place = Place::of_stories(&STORIES);
    place.passes(1, &words(8, "TRAIN.MAX_STEPS 4"));
    let one = losses(&place);
    let cut = Place::of_stories(&STORIES);
    cut.passes(4, &words(4, "TRAIN.MAX_STEPS 2 PARALLEL.TP 2 PARALLEL.ZERO 1 MODEL.CHECKPOINT full"));
    // Other meshes resume what this one has saved.
    cut.passes(2, &words(8, "TRAIN.MAX_STEPS 3 PARALLEL.TP 2 MODEL.LOSS_CHUNKS 2"));
    cut.passes(2, &words(4, "TRAIN.MAX_STEPS 4"));
    let steps = |losses: &[f64]| losses[..4].to_vec();
    assert_close(&steps(&one), &steps(&losses(&cut)), "resumed on other meshes");
    let one = tested(&cut, 1, "");
    assert_same_figures(&one, &tested(&cut, 2, "PARALLEL.TP 2"));
    assert_same_figures(&one, &tested(&cut, 4, "PARALLEL.CP 2 PARALLEL.TP 2 MODEL.DROPOUT 0"));
    let out = cut.path("hf").display().to_string();
    let from = cut.path("exp").display().to_string();
    let exported =
        ended(start(1, ["export", "--from", &from, "--out", &out].map(str::to_owned).to_vec())).remove(0);
    assert!(exported.exit.is_success(), "{}", exported.stderr);
    let tensors = Tensor::read_safetensors(cut.path("hf/model.safetensors")).unwrap();
    let attention = tensors.iter().find(|(name, _)| name == "h.0.attn.c_attn.weight").unwrap();
    assert_eq!(attention.1.size(), [48, 144]);
}

#[test]
fn texts_are_cut_among_ranks_and_weights_of_a_file_are_loaded() {
    let words =
        |batch: usize, more: &str| format!("train {STEPS} TRAIN.MAX_STEPS 3 TRAIN.BATCH_SIZE {batch} {more}");
    let place = Place::of_stories(&STORIES);
    place.passes(1, &words(4, ""));
    let weights = place.path("exp/checkpoints/latest/model.safetensors").display().to_string();
    let runs = [
        (1, words(4, "")),
        (2, words(4, "PARALLEL.CP 2")),
        (4, words(4, "PARALLEL.CP 2 PARALLEL.TP 2 PRECISION bf16")),
        (4, words(2, "PARALLEL.TP 2 PARALLEL.ZERO 3 MODEL.VOCAB_MULTIPLE 64")),
    ];
    let all = runs.map(|(ranks, words)| {
        let place = Place::of_stories(&STORIES);
        place.passes(ranks, &format!("{words} MODEL.WEIGHTS {weights}"));
        losses(&place)
    });
    assert_close(&all[0], &all[1], "cp 2");
    assert!(all[0].iter().zip(&all[2]).all(|(one, other)| (one - other).abs() < 0.02 * one), "{all:?}");
    assert_close(&all[0], &all[3], "tp 2 with ZeRO 3");
}

#[test]
fn parity_is_verified_on_meshes() {
    let place = Place::of_stories(&STORIES);
    for (ranks, words) in
        [(2, "PARALLEL.TP 2"), (4, "PARALLEL.CP 2 PARALLEL.TP 2"), (4, "PARALLEL.TP 2 PARALLEL.ZERO 1")]
    {
        let said = place.passes(ranks, &format!("train --verify-parity=3 TRAIN.BATCH_SIZE 4 {words}"));
        assert!(said.contains("the same, but for rounding"), "{words}: {said}");
    }
    assert!(!place.path("exp/checkpoints").exists(), "nothing was written");
}

#[test]
fn meshes_that_cannot_be_are_one_error() {
    let place = Place::of_stories(&STORIES);
    for (ranks, words, expected) in [
        (3, "PARALLEL.TP 3", "PARALLEL.TP is 3, which does not divide MODEL.N_HEAD 2; try a divisor: 1, 2"),
        (3, "PARALLEL.TP 2", "and the job has 3; try a product among the divisors of 3: 1, 3"),
        (
            2,
            "PARALLEL.CP 2 MODEL.DROPOUT 0.1",
            "MODEL.DROPOUT is 0.1, which ring attention with PARALLEL.CP 2 has not; try 0",
        ),
        (2, "PARALLEL.TP 2 PARALLEL.DP 2", "try divisors of 1: 1"),
        (2, "PARALLEL.TP 2 OPTIM.METHOD lamb", "Lamb's trust ratio needs whole parameters"),
    ] {
        let all = place.run(ranks, &format!("train {words}"));
        assert!(all.iter().all(|rank| !rank.exit.is_success()), "{words}");
        assert!(all.iter().any(|rank| rank.stderr.contains(expected)), "{words}: {}", all[0].stderr);
    }
    assert!(!place.path("exp/checkpoints/latest").exists(), "nothing was trained");
}
