//! `drumline-train` with `PARALLEL.PP`: the losses of one rank, products of meshes, resume and test on others, parity, traces, and
//! what cannot be.

use drumline_observe::{status, trace};
use drumline_text::synth_story::SynthStoryOptions;
use drumline_text::synth_text::SynthTextOptions;

use serde_json::Value;

use super::mesh_runs::{assert_close, losses, tested};
use super::running::{Place, assert_same_figures};

const STORIES: SynthStoryOptions = SynthStoryOptions { train: 40, valid: 6, seed: 3 };
const STEPS: &str =
    "OPTIM.MAX_EPOCH 4 OPTIM.SCHEDULE constant OPTIM.WARMUP 0 TRAIN.PRINT_FREQ 1 TRAIN.SAVE_FREQ 2";

/// Words of a training of a GPT with four blocks and dropout.
fn of_gpt(batch: usize, more: &str) -> String {
    format!(
        "train {STEPS} TRAIN.BATCH_SIZE {batch} TEST.BATCH_SIZE 3 MODEL.N_LAYER 4 MODEL.DROPOUT 0.1 OPTIM.GRAD_CLIP 1.0 {more}"
    )
}

#[test]
fn pipelines_have_the_losses_of_one_rank_with_any_schedule() {
    let words = |more: &str| of_gpt(2, &format!("TRAIN.MAX_STEPS 3 {more}"));
    let place = Place::of_stories(&STORIES);
    let said = place.passes(1, &words("TRAIN.ACCUMULATE 4"));
    assert!(!said.contains("== pipeline"), "{said}");
    let one = losses(&place);
    for (ranks, more) in [
        (2, "PARALLEL.PP 2 TRAIN.ACCUMULATE 4"),
        (3, "PARALLEL.PP 3 PARALLEL.SCHEDULE gpipe PARALLEL.MICRO_BATCHES 4"),
        (2, "PARALLEL.PP 2 PARALLEL.SCHEDULE zbv PARALLEL.MICRO_BATCHES 4 MODEL.CHECKPOINT full"),
        (2, "PARALLEL.PP 2 PARALLEL.SCHEDULE interleaved PARALLEL.CHUNKS 3 PARALLEL.MICRO_BATCHES 4"),
    ] {
        let place = Place::of_stories(&STORIES);
        let said = place.passes(ranks, &words(more));
        assert!(said.contains("[init] == pipeline "), "{said}");
        assert_close(&one, &losses(&place), more);
    }
}

#[test]
fn products_of_meshes_train_and_others_resume() {
    let place = Place::of_stories(&STORIES);
    place.passes(1, &of_gpt(4, "TRAIN.MAX_STEPS 4 TRAIN.ACCUMULATE 2"));
    let one = losses(&place);
    let cut = Place::of_stories(&STORIES);
    let steps = |most: usize| format!("TRAIN.MAX_STEPS {most} PARALLEL.MICRO_BATCHES 2");
    cut.passes(
        8,
        &of_gpt(
            2,
            &format!("{} PARALLEL.PP 2 PARALLEL.TP 2 PARALLEL.ZERO 1 PARALLEL.SCHEDULE zb1p", steps(1)),
        ),
    );
    cut.passes(4, &of_gpt(2, &format!("{} PARALLEL.PP 2 PARALLEL.DP 2", steps(2))));
    cut.passes(2, &of_gpt(2, &format!("{} PARALLEL.ZERO 3", steps(3))));
    cut.passes(6, &of_gpt(2, &format!("{} PARALLEL.PP 3 PARALLEL.ZERO 2", steps(4))));
    let steps = |losses: &[f64]| losses[..4].to_vec();
    assert_close(&steps(&one), &steps(&losses(&cut)), "resumed on other meshes");
    let one = tested(&cut, 1, "MODEL.N_LAYER 4");
    assert_same_figures(&one, &tested(&cut, 2, "MODEL.N_LAYER 4 PARALLEL.PP 2"));
    assert_same_figures(&one, &tested(&cut, 4, "MODEL.N_LAYER 4 PARALLEL.PP 2 PARALLEL.TP 2"));
}

#[test]
fn texts_are_cut_along_cp_in_pipelines_too() {
    let words = |more: &str| format!("train {STEPS} TRAIN.MAX_STEPS 3 MODEL.N_LAYER 4 {more}");
    let place = Place::of_stories(&STORIES);
    place.passes(1, &words("TRAIN.BATCH_SIZE 4 TRAIN.ACCUMULATE 2"));
    let weights = place.path("exp/checkpoints/latest/model.safetensors").display().to_string();
    let cut = Place::of_stories(&STORIES);
    cut.passes(4, &words("TRAIN.BATCH_SIZE 4 PARALLEL.PP 2 PARALLEL.CP 2 PARALLEL.MICRO_BATCHES 2"));
    assert_close(&losses(&place), &losses(&cut), "cp 2");
    // Weights of a file reach the stages that have them.
    let runs =
        [(1, "TRAIN.ACCUMULATE 2"), (3, "PARALLEL.PP 3 PARALLEL.MICRO_BATCHES 2")].map(|(ranks, more)| {
            let place = Place::of_stories(&STORIES);
            place.passes(ranks, &words(&format!("TRAIN.BATCH_SIZE 4 {more} MODEL.WEIGHTS {weights}")));
            losses(&place)
        });
    assert_close(&runs[0], &runs[1], "weights of a file");
}

#[test]
fn networks_on_images_are_cut_into_stages() {
    let words = |more: &str| {
        format!(
            "train MODEL.ARCH resnet18 TRAIN.BATCH_SIZE 2 TRAIN.MAX_STEPS 3 TRAIN.PRINT_FREQ 1 OPTIM.MAX_EPOCH 1 OPTIM.BASE_LR 0.0001 {more}"
        )
    };
    let runs = [
        (1, "TRAIN.ACCUMULATE 2"),
        (2, "PARALLEL.PP 2 PARALLEL.MICRO_BATCHES 2"),
        (
            3,
            "PARALLEL.PP 3 PARALLEL.SCHEDULE gpipe PARALLEL.MICRO_BATCHES 2 MODEL.MEMORY_FORMAT channels_last",
        ),
    ];
    let all = runs.map(|(ranks, more)| {
        let place = Place::of_images(16, 9);
        place.passes(ranks, &words(more));
        losses(&place)
    });
    assert_close(&all[0], &all[1], "two stages");
    // Another order of sums in convolutions.
    assert!((all[0][0] - all[2][0]).abs() < 0.01 * all[0][0], "{all:?}");
}

#[test]
fn masked_words_are_predicted_by_stages() {
    let texts = SynthTextOptions { train: 120, dev: 30, test: 20, seed: 3 };
    let words = |more: &str| format!("train OPTIM.MAX_EPOCH 1 TRAIN.MAX_STEPS 3 TRAIN.PRINT_FREQ 1 {more}");
    let runs = [
        (1, "TRAIN.ACCUMULATE 2"),
        (2, "PARALLEL.PP 2 PARALLEL.MICRO_BATCHES 2"),
        (4, "PARALLEL.PP 2 PARALLEL.TP 2 PARALLEL.MICRO_BATCHES 2 PARALLEL.SCHEDULE zb1p"),
    ];
    let all = runs.map(|(ranks, more)| {
        let place = Place::of_masks(&texts);
        place.passes(ranks, &words(more));
        losses(&place)
    });
    assert_close(&all[0], &all[1], "two stages");
    assert_close(&all[0], &all[2], "stages and parts of layers");
}

#[test]
fn parity_is_verified_in_pipelines() {
    let place = Place::of_stories(&STORIES);
    for (ranks, words) in
        [(2, "PARALLEL.PP 2"), (4, "PARALLEL.PP 2 PARALLEL.TP 2"), (4, "PARALLEL.PP 2 PARALLEL.ZERO 1")]
    {
        let words = format!("train --verify-parity=3 TRAIN.BATCH_SIZE 2 PARALLEL.MICRO_BATCHES 2 {words}");
        let said = place.passes(ranks, &words);
        assert!(said.contains("the same, but for rounding"), "{words}: {said}");
    }
    assert!(!place.path("exp/checkpoints").exists(), "nothing was written");
}

/// The lines of all ranks' traces, in one file.
fn traced(place: &Place, ranks: usize) -> Vec<Value> {
    let files: Vec<_> = (0..ranks).map(|rank| trace::file_of(&place.path("exp"), rank)).collect();
    let all = place.path("all.json");
    trace::merge(&files, &all).unwrap();
    let whole: Value = serde_json::from_slice(&std::fs::read(all).unwrap()).unwrap();
    whole["traceEvents"].as_array().unwrap().clone()
}

/// The arrows that have an end of this kind, in order, each by its id and name with the rank of the end.
fn ends(lines: &[Value], ph: &str) -> Vec<(String, u64)> {
    let ends = lines.iter().filter(|line| line["ph"] == ph);
    let key = |line: &Value| (format!("{} {}", line["id"], line["name"]), line["pid"].as_u64().unwrap());
    let mut ends: Vec<_> = ends.map(key).collect();
    ends.sort_unstable();
    ends
}

#[test]
fn a_trace_has_the_stages_messages_and_bubbles_of_all_ranks() {
    let place = Place::of_stories(&STORIES);
    let words = of_gpt(1, "TRAIN.MAX_STEPS 8 TRAIN.TRACE_STEPS 2 PARALLEL.PP 2 PARALLEL.MICRO_BATCHES 4");
    place.passes(2, &words);
    let lines = traced(&place, 2);
    let count = |rank: u64, name: &str| {
        lines.iter().filter(|line| line["ph"] == "X" && line["pid"] == rank && line["name"] == name).count()
    };
    for stage in 0..2 {
        for what in ["forward", "backward"] {
            for micro_batch in 0..4 {
                let name = format!("{what} of stage {stage}, micro-batch {micro_batch}");
                let found = [0, 1].map(|rank| count(rank, &name));
                assert_eq!(found, if stage == 0 { [2, 0] } else { [0, 2] }, "{name}, in two steps");
            }
        }
    }
    let bubbles = [
        "bubble: waits for the gradients that stage 1 sends for micro-batch 0",
        "bubble: waits for the activations that stage 0 sends for micro-batch 0",
    ];
    assert_eq!([count(0, bubbles[0]), count(1, bubbles[1])], [2, 2]);
    assert_eq!([0, 1].map(|rank| count(rank, "bubble: waits until all ranks are done")), [2, 2]);
    // Each message leaves one rank and reaches the other: activations rank 1, gradients rank 0.
    let [tails, heads] = ["s", "f"].map(|ph| ends(&lines, ph));
    assert_eq!(tails.len(), 2 * 2 * 4, "{tails:?}");
    for ((tail, from), (head, to)) in tails.iter().zip(&heads) {
        let expected = if tail.contains("activations") { (0, 1) } else { (1, 0) };
        assert_eq!((tail, (*from, *to)), (head, expected));
    }
    assert!(tails.windows(2).all(|two| two[0].0 != two[1].0), "each id once: {tails:?}");
    let ranks = status::read(&place.path("exp"));
    let places: Vec<_> = ranks.iter().map(|rank| rank.mesh.as_deref()).collect();
    assert_eq!(places, [Some("pp 0/2"), Some("pp 1/2")]);
    let is_share = |rank: &status::RankStatus| rank.bubble.is_some_and(|share| share > 0.0 && share < 1.0);
    assert!(ranks.iter().all(is_share), "{ranks:?}");
}

#[test]
fn pipelines_that_cannot_be_are_one_error() {
    let place = Place::of_stories(&STORIES);
    for (ranks, words, expected) in [
        (5, "PARALLEL.PP 5", "and the model has 4 layers; try at most 4"),
        (3, "PARALLEL.PP 2", "PARALLEL.PP 2 are 2 ranks, and the job has 3"),
        (2, "PARALLEL.PP 2 PARALLEL.ZERO 3", "each rank keeps the parameters of its stages; try 2"),
        (2, "PARALLEL.PP 2 PARALLEL.CHUNKS 2", "the schedule 1f1b has 1 stage a rank, not 2"),
        (2, "PARALLEL.PP 2 PARALLEL.SCHEDULE zb9", "gpipe, 1f1b, interleaved, bfs, zb1p or zbv"),
        (2, "TRAIN.ACCUMULATE 2 PARALLEL.MICRO_BATCHES 4", "which mean the same; try one of them"),
        (2, "PARALLEL.PP 2 PARALLEL.OFFLOAD disk", "which PARALLEL.PP 2 does not support; try none"),
    ] {
        let all = place.run(ranks, &format!("train {words}"));
        assert!(all.iter().all(|rank| !rank.exit.is_success()), "{words}");
        assert!(all.iter().any(|rank| rank.stderr.contains(expected)), "{words}: {}", all[0].stderr);
    }
    assert!(!place.path("exp/checkpoints/latest").exists(), "nothing was trained");
    let images = Place::of_images(8, 8);
    for (words, expected) in [
        (
            "MODEL.ARCH resnet18 MODEL.SYNCBN True",
            "MODEL.SYNCBN is True, which PARALLEL.PP 2 does not support; try False",
        ),
        ("MODEL.ARCH mlp", "and this model is not cut into stages; try 1"),
    ] {
        let all = images.run(2, &format!("train PARALLEL.PP 2 {words}"));
        assert!(all.iter().all(|rank| !rank.exit.is_success()), "{words}");
        assert!(all.iter().any(|rank| rank.stderr.contains(expected)), "{words}: {}", all[0].stderr);
    }
}
