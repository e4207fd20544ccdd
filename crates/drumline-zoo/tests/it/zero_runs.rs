//! Sharded training with `drumline-train`: other ranks and stages resume, the export is that of an unsharded run, and
//! what cannot work is one error.

use std::collections::BTreeMap;
use std::path::Path;

use drumline_text::synth_story::SynthStoryOptions;
use drumline_text::synth_text::SynthTextOptions;
use tch::{Kind, Tensor};

use super::running::{Place, Rank, column, ended, start};

const STORIES: SynthStoryOptions = SynthStoryOptions { train: 24, valid: 6, seed: 3 };

fn run(words: &[&str]) -> Rank {
    let rank = ended(start(1, words.iter().map(|word| (*word).to_owned()).collect())).remove(0);
    assert!(rank.exit.is_success(), "{words:?}: {}{}", rank.stdout, rank.stderr);
    rank
}

/// The tensors of a run's export.
fn exported(place: &Place) -> BTreeMap<String, Tensor> {
    exported_from(place, "exp", "hf")
}

fn exported_from(place: &Place, run_folder: &str, out_folder: &str) -> BTreeMap<String, Tensor> {
    let [from, out] = [run_folder, out_folder].map(|name| place.path(name).display().to_string());
    run(&["export", "--from", &from, "--out", &out]);
    Tensor::read_safetensors(place.path(out_folder).join("model.safetensors")).unwrap().into_iter().collect()
}

fn num_shards(checkpoint: &Path) -> usize {
    let names = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().file_name());
    names.filter(|name| name.to_str().unwrap().starts_with("shard-")).count()
}

#[test]
fn other_ranks_resume_and_the_export_is_that_of_an_unsharded_run() {
    let [sharded, plain] = [(); 2].map(|()| Place::of_stories(&STORIES));
    let steps = |most: usize| {
        format!("OPTIM.MAX_EPOCH 4 MODEL.VOCAB_MULTIPLE 64 TRAIN.SAVE_FREQ 2 TRAIN.MAX_STEPS {most}")
    };
    plain.passes(2, &format!("train {}", steps(4)));
    sharded.passes(2, &format!("train {} PARALLEL.ZERO 3", steps(4)));
    let latest = sharded.path("exp/checkpoints/latest");
    assert_eq!(num_shards(&latest), 4, "each rank has written a file of the model and one of the optimizer");
    let (ours, theirs) = (exported(&sharded), exported(&plain));
    assert_eq!(ours.keys().collect::<Vec<_>>(), theirs.keys().collect::<Vec<_>>());
    for (name, tensor) in &ours {
        assert_eq!(tensor.size(), theirs[name].size(), "{name}");
        let difference = f64::try_from((tensor - &theirs[name]).abs().max()).unwrap();
        assert!(difference < 1e-4, "{name} differs by {difference:e}");
    }
    let generate = |from: &str| {
        let from = sharded.path(from).display().to_string();
        run(&["generate", "--from", &from, "--greedy", "--max-tokens", "20", "Ada"]).stdout
    };
    assert_eq!(generate("exp"), generate("hf"));
    // The folder with the files of all ranks is accepted as first weights.
    let weights = format!("MODEL.WEIGHTS {} OUT_DIR {}", latest.display(), sharded.path("tuned").display());
    sharded.passes(1, &format!("train {weights} {}", steps(1)));
    let said = sharded.passes(3, &format!("train {} PARALLEL.ZERO 2", steps(6)));
    assert!(said.contains("6 steps"), "{said}");
    assert_eq!(num_shards(&latest), 6, "three ranks wrote them");
}

/// The losses of steps and of the evaluation after them.
fn losses(place: &Place) -> Vec<f64> {
    let events = place.events();
    [column(&events, "step", "loss"), column(&events, "eval", "loss")].concat()
}

#[test]
fn every_task_has_the_losses_of_one_rank_in_stage_3() {
    let texts = SynthTextOptions { train: 90, dev: 21, test: 10, seed: 3 };
    let places: [(&str, &dyn Fn() -> Place, &str); 5] = [
        ("images", &Place::new, ""),
        ("texts", &|| Place::of_texts("classify", &texts), "MODEL.DROPOUT 0 OPTIM.METHOD sgd"),
        (
            "tags",
            &|| Place::of_texts("tag", &texts),
            "MODEL.DROPOUT 0 OPTIM.METHOD sgd MODEL.NET transformer",
        ),
        ("masked words", &|| Place::of_masks(&texts), "MODEL.DROPOUT 0 OPTIM.METHOD sgd"),
        ("stories", &|| Place::of_stories(&STORIES), ""),
    ];
    for (task, new, more) in places {
        let runs = ["TRAIN.ACCUMULATE 2", "PARALLEL.ZERO 3", "PARALLEL.ZERO 3 OPTIM.BASE_LR 0.2"];
        let [one, two, control] = [(1, runs[0]), (2, runs[1]), (2, runs[2])].map(|(ranks, parallel)| {
            let place = new();
            let words = "TRAIN.BATCH_SIZE 4 TRAIN.PRINT_FREQ 1 TRAIN.MAX_STEPS 5 OPTIM.MAX_EPOCH 1";
            place.passes(ranks, &format!("train {words} {more} {parallel}"));
            losses(&place)
        });
        let furthest = |ours: &[f64]| {
            assert_eq!(ours.len(), one.len(), "{task}");
            ours.iter().zip(&one).map(|(a, b)| (a - b).abs() / b.abs()).fold(0.0, f64::max)
        };
        assert!(one.len() >= 5 && furthest(&two) < 1e-4, "{task}: {two:?}, on one rank {one:?}");
        assert!(furthest(&control) > 1e-3, "the control of {task}: {control:?}");
    }
}

#[test]
fn weights_of_a_file_reach_all_ranks_through_rank_0() {
    let place = Place::of_stories(&STORIES);
    let steps = "OPTIM.MAX_EPOCH 4 TRAIN.MAX_STEPS 2";
    place.passes(1, &format!("train {steps}"));
    let first = exported(&place);
    let file = place.path("hf/model.safetensors").display().to_string();
    let tuned = |out: &str, more: &str| {
        let out_dir = place.path(out).display().to_string();
        place.passes(2, &format!("train {steps} MODEL.WEIGHTS {file} OUT_DIR {out_dir} {more}"));
        out.to_owned()
    };
    let runs = [
        tuned("ddp", ""),
        tuned("zero", "PARALLEL.ZERO 3"),
        tuned("ddp16", "PRECISION bf16-master"),
        tuned("zero16", "PRECISION bf16-master PARALLEL.ZERO 3"),
    ];
    let [ddp, zero, ddp16, zero16] = runs.map(|run| exported_from(&place, &run, &format!("hf-{run}")));
    let most = |ours: &BTreeMap<String, Tensor>, theirs: &BTreeMap<String, Tensor>| {
        let difference = |(name, tensor): (&String, &Tensor)| {
            f64::try_from((tensor.to_kind(Kind::Float) - theirs[name].to_kind(Kind::Float)).abs().max())
                .unwrap()
        };
        ours.iter().map(difference).fold(0.0, f64::max)
    };
    assert!(most(&ddp, &zero) < 1e-5 && most(&ddp16, &zero16) < 1e-2);
    assert!(most(&ddp, &first) > 1e-4, "control: the steps change weights");
}

#[test]
fn micro_batches_are_accumulated_as_is_said() {
    let place = Place::of_stories(&STORIES);
    let said =
        place.passes(2, "train OPTIM.MAX_EPOCH 1 TRAIN.MAX_STEPS 2 TRAIN.ACCUMULATE 2 PARALLEL.ZERO 3");
    let line = said.lines().find(|line| line.starts_with("[shard] ==")).unwrap();
    assert!(line.contains("reduced once per step: whole gradients have"), "{line}");
}

#[test]
fn a_stage_or_mesh_that_cannot_be_is_one_error() {
    let place = Place::of_stories(&STORIES);
    for (words, expected) in [
        ("train PARALLEL.ZERO 4", "0, 1, 2 or 3"),
        ("train PARALLEL.ZERO 3 PARALLEL.DP 2", "try divisors of 3: 1, 3"),
        ("train PARALLEL.SHARD 3", "PARALLEL.ZERO 0 divides nothing; try PARALLEL.ZERO 3"),
    ] {
        let ranks = place.run(3, words);
        assert!(ranks.iter().all(|rank| !rank.exit.is_success()), "{words}");
        assert!(ranks.iter().any(|rank| rank.stderr.contains(expected)), "{words}: {}", ranks[0].stderr);
    }
    assert!(!place.path("exp/checkpoints").exists(), "nothing was begun");
}
