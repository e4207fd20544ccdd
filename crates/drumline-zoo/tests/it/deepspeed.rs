//! `--deepspeed`: the example of the repository trains, its settings are those of our own keys, and mistakes are one
//! error before anything is begun.

use std::path::Path;

use drumline_text::synth_story::SynthStoryOptions;
use serde_json::Value;

use super::running::{Place, column};

const STORIES: SynthStoryOptions = SynthStoryOptions { train: 24, valid: 6, seed: 3 };

/// The file of a DeepSpeed guide: fp16, AdamW, WarmupLR, ZeRO-2, offload, and `"auto"`.
fn example() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../config/deepspeed/zero2.json");
    path.display().to_string()
}

fn written(place: &Place, text: &str) -> String {
    let path = place.path("ds.json");
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn the_example_trains_on_two_ranks() {
    let place = Place::of_stories(&STORIES);
    let keys = "PRECISION fp16 OPTIM.MAX_EPOCH 4 OPTIM.GRAD_CLIP 1.0 TRAIN.ACCUMULATE 2 --device cpu";
    let (keys, device) = keys.split_once(" --").unwrap();
    let words = format!("train --{device} --deepspeed {} {keys}", example());
    let said = place.passes(2, &words);
    assert_eq!(said.matches("[deepspeed] ==").count(), 1, "rank 0 says it once: {said}");
    for words in [
        "PRECISION fp16",
        "OPTIM.METHOD adamw; Adam",
        "OPTIM.BASE_LR 0.005; 0.005, from OPTIM.BASE_LR",
        "PARALLEL.ZERO 2",
        "0.05 of all steps, from OPTIM.WARMUP",
        "TRAIN.BATCH_SIZE 8; 8, from TRAIN.BATCH_SIZE",
    ] {
        assert!(said.contains(words) || words.starts_with("PRECISION"), "{words}: {said}");
    }
    let config = std::fs::read_to_string(place.path("exp/config.yaml")).unwrap();
    for line in ["  ZERO: 2", "  LOSS_SCALE_WINDOW: 1000", "  PRINT_FREQ: 2000", "type: WarmupLR"] {
        assert!(config.contains(line), "{line}: {config}");
    }
    let losses = column(&place.events(), "eval", "loss");
    assert!(losses.last().unwrap() < &(0.9 * losses[0]), "{losses:?}");
    // The resolved configuration alone repeats the run.
    let again = place.passes(2, "train TRAIN.AUTO_RESUME false OPTIM.MAX_EPOCH 1 TRAIN.MAX_STEPS 1");
    assert!(!again.contains("[deepspeed]"), "control");
}

#[test]
fn a_file_trains_as_the_same_keys_do() {
    let ds = r#"{
        "train_batch_size": 32, "gradient_accumulation_steps": 2, // so 8 on each of 2 ranks
        "gradient_clipping": 0.5,
        "optimizer": {"type": "Adam", "params": {"lr": 0.005, "betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.05}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto",
            "warmup_min_lr": 1e-4, "warmup_num_steps": 3, "warmup_type": "linear"}},
        "zero_optimization": {"stage": 1},
    }"#;
    let keys = "TRAIN.ACCUMULATE 2 OPTIM.GRAD_CLIP 0.5 OPTIM.METHOD adamw OPTIM.BETAS [0.8,0.99] OPTIM.EPS 1e-6 \
                OPTIM.WEIGHT_DECAY 0.05 PARALLEL.ZERO 1 OPTIM.SCHEDULER \
                {type:WarmupDecayLR,params:{total_num_steps:auto,warmup_max_lr:0.005,warmup_min_lr:1e-4,warmup_num_steps:3,warmup_type:linear}}";
    let losses = |flags: &dyn Fn(&Place) -> String, keys: &str| {
        let place = Place::of_stories(&STORIES);
        let flags = flags(&place);
        place.passes(2, &format!("train {flags} OPTIM.MAX_EPOCH 2 TRAIN.PRINT_FREQ 1 {keys}"));
        [column(&place.events(), "step", "loss"), column(&place.events(), "step", "lr")]
    };
    let ours = losses(&|_| String::new(), keys);
    let theirs = losses(&|place| format!("--deepspeed {}", written(place, ds)), "");
    assert!(ours[0].len() > 3, "{ours:?}");
    assert_eq!(theirs, ours);
    let plain = losses(&|_| String::new(), "TRAIN.ACCUMULATE 2");
    assert_ne!(plain, ours, "control: the keys change the training");
}

#[test]
fn it_is_explained_without_training() {
    let place = Place::of_stories(&STORIES);
    let ds = r#"{"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": true, "loss_scale": 0},
        "zero_optimization": {"stage": 2, "overlap_comm": true, "overlap_com": false}}"#;
    let file = written(&place, ds);
    let said = place.passes(1, &format!("train --deepspeed {file} --explain"));
    let line =
        |key: &str| said.lines().find(|line| line.contains(key)).unwrap_or_else(|| panic!("{key}: {said}"));
    assert!(line("bf16.enabled").contains("PRECISION bf16-master"), "{said}");
    assert!(line("overlap_comm").contains("not needed"), "{said}");
    assert!(line("overlap_com ").contains("unknown"), "{said}");
    assert!(!place.path("exp").exists(), "nothing was begun");
    let json = place.passes(1, &format!("train --deepspeed {file} --explain --json"));
    let json: Value = serde_json::from_str(&json).unwrap();
    assert_eq!(json["lines"][3]["key"], "bf16.loss_scale");
    assert_eq!(json["lines"][3]["effect"], "no effect");
    let strict = place.run(1, &format!("train --deepspeed {file} --explain --strict")).remove(0);
    assert!(!strict.exit.is_success());
    assert_eq!(strict.stdout.matches("mistake: ").count(), 2, "{}", strict.stdout);
    assert!(strict.stderr.contains("cannot be used: 2 mistakes"), "{}", strict.stderr);
}

#[test]
fn mistakes_are_one_error_and_nothing_is_begun() {
    let place = Place::of_stories(&STORIES);
    for (ds, keys, words) in [
        (r#"{"train_batch_size": 33, "gradient_accumulation_steps": 2}"#, "", "try train_batch_size 32"),
        (
            r#"{"train_micro_batch_size_per_gpu": 4}"#,
            "TRAIN.BATCH_SIZE 16",
            "is 4, and TRAIN.BATCH_SIZE (the command line) is 16; try \"auto\" here, or only one of them",
        ),
        (
            r#"{"zero_optimization": {"stage": 3}}"#,
            "PARALLEL.ZERO 1",
            "means PARALLEL.ZERO 3, and the command line has 1",
        ),
        (r#"{"optimizer": {"type": "OneBitAdam"}}"#, "", "optimizer.type is OneBitAdam"),
        (
            r#"{"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": "auto", "cycle_max_lr": 1}}}"#,
            "",
            "scheduler.params.cycle_min_lr is \"auto\", and nothing is given from which it follows; try a number",
        ),
        ("{\"fp16\": {\"enabled\": true}, \"fp16\": {}}", "", "the key fp16 appears twice, first in line 1"),
    ] {
        let file = written(&place, ds);
        let ranks = place.run(2, &format!("train --deepspeed {file} TRAIN.MAX_STEPS 1 {keys}"));
        assert!(ranks.iter().all(|rank| !rank.exit.is_success()), "{ds}");
        let said: String = ranks.iter().map(|rank| rank.stderr.as_str()).collect();
        assert!(said.contains(words), "{ds}: {said}");
        assert!(said.contains("ds.json"), "{ds}: {said}");
    }
    let missing = place.run(1, "train --deepspeed nosuch.json").remove(0);
    assert!(missing.stderr.contains("cannot read nosuch.json"), "{}", missing.stderr);
    assert!(!place.path("exp/checkpoints").exists(), "nothing was begun");
}

#[test]
fn other_optimizers_and_csv_files_of_the_file_are_those_of_our_keys() {
    let files = [
        (
            r#"{"optimizer": {"type": "Adagrad", "params": {"lr": 0.005, "initial_accumulator_value": 0.1}},
                "csv_monitor": {"enabled": true, "output_path": "DIR/out"}}"#,
            "OPTIM.METHOD adagrad OPTIM.INITIAL_ACCUMULATOR 0.1 OPTIM.WEIGHT_DECAY 0",
        ),
        (
            r#"{"optimizer": {"type": "AdamW", "params": {"lr": 0.005, "amsgrad": true, "betas": [0.3, 0.5]}},
                "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.01, "cycle_first_step_size": 3}}}"#,
            "OPTIM.METHOD adamw OPTIM.AMSGRAD true OPTIM.BETAS [0.3,0.5] OPTIM.WEIGHT_DECAY 0 OPTIM.SCHEDULER \
             {type:OneCycle,params:{cycle_min_lr:0.001,cycle_max_lr:0.01,cycle_first_step_size:3}}",
        ),
    ];
    for (ds, keys) in files {
        let losses = |place: &Place, words: &str| {
            place.passes(2, &format!("train {words} TRAIN.MAX_STEPS 6 TRAIN.PRINT_FREQ 1 OPTIM.MAX_EPOCH 9"));
            column(&place.events(), "step", "loss")
        };
        let (theirs, ours) = (Place::of_stories(&STORIES), Place::of_stories(&STORIES));
        let file = written(&theirs, &ds.replace("DIR", theirs.path("").to_str().unwrap()));
        let found = losses(&theirs, &format!("--deepspeed {file}"));
        assert_eq!((found.len(), &found), (6, &losses(&ours, keys)), "{ds}");
        let csv = theirs.path("out/DeepSpeedJobName/Train_Samples_lr.csv");
        assert_eq!(csv.is_file(), ds.contains("csv_monitor"));
        if csv.is_file() {
            let text = std::fs::read_to_string(csv).unwrap();
            let lines: Vec<_> = text.lines().collect();
            assert!(lines[0] == "step,lr" && lines[6].starts_with("96,") && lines.len() == 7, "{text}");
        }
    }
}

#[test]
fn folders_that_cannot_be_written_are_named_before_the_training() {
    let place = Place::of_stories(&STORIES);
    for (ds, words) in [
        (
            r#"{"csv_monitor": {"enabled": true, "output_path": "/proc/none"}}"#,
            "cannot write to TRAIN.CSV /proc/none/DeepSpeedJobName",
        ),
        (
            r#"{"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/proc/none"}}}"#,
            "cannot write to PARALLEL.OFFLOAD_DIR /proc/none",
        ),
    ] {
        let ranks = place.run(2, &format!("train --deepspeed {} TRAIN.MAX_STEPS 1", written(&place, ds)));
        assert!(ranks.iter().all(|rank| !rank.exit.is_success()), "{ds}");
        assert!(ranks[0].stderr.contains(words), "{ds}: {}", ranks[0].stderr);
        assert!(!place.path("exp/checkpoints").exists(), "nothing was begun");
    }
}

#[test]
fn images_train_by_sgd_and_a_schedule_of_steps() {
    let place = Place::of_images(16, 4);
    let sgd = r#"{"optimizer": {"type": "SGD", "params": {"lr": 0.01, "momentum": 0.8, "nesterov": true}},
        "communication_data_type": "bf16", "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}"#;
    let said = place.passes(2, &format!("train --deepspeed {} OPTIM.MAX_EPOCH 1", written(&place, sgd)));
    assert!(said.contains("OPTIM.MOMENTUM 0.8") && said.contains("PARALLEL.REDUCE_IN bf16"), "{said}");
}
