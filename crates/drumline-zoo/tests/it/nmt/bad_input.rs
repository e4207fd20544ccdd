//! Bad input: told once, with file and line, and nothing is lost.

use super::Task;

/// What all ranks end with, told by one of them.
fn refused(task: &Task, words: &str) -> String {
    let ranks = task.run(2, words);
    assert!(ranks.iter().all(|rank| !rank.exit.is_success()), "{words}");
    let told: Vec<_> = ranks.iter().map(|rank| rank.stderr.as_str()).collect();
    assert!(told[1].is_empty() && !told[0].is_empty(), "{words}: {told:?}");
    told[0].to_owned()
}

const TRAIN: &str = "nmt --config_path DIR/nmt.yaml training_configs.max_steps 4";

#[test]
fn files_that_do_not_fit_are_named_with_their_lines() {
    let task = Task::new();
    let (source, target) = (task.read("train.src"), task.read("train.tgt"));
    std::fs::write(task.path("train.tgt"), target.lines().skip(1).collect::<Vec<_>>().join("\n")).unwrap();
    let told = refused(&task, TRAIN);
    assert!(told.contains("train.src\" has 100 lines") && told.contains("train.tgt\" has 99"), "{told}");

    std::fs::write(task.path("train.tgt"), &target).unwrap();
    let mut bytes = source.clone().into_bytes();
    let third = source.match_indices('\n').nth(1).unwrap().0 + 2;
    bytes[third] = 0xff;
    std::fs::write(task.path("train.src"), bytes).unwrap();
    let told = refused(&task, TRAIN);
    assert!(told.contains("line 3 of") && told.contains("train.src\" is not UTF-8"), "{told}");

    std::fs::write(task.path("train.src"), source).unwrap();
    std::fs::rename(task.path("vocab.tgt.json"), task.path("moved.json")).unwrap();
    let told = refused(&task, TRAIN);
    assert!(told.contains("cannot read the vocabulary") && told.contains("vocab.tgt.json"), "{told}");
    std::fs::rename(task.path("moved.json"), task.path("vocab.tgt.json")).unwrap();

    let told = refused(&task, &format!("{TRAIN} data_configs.bleu_valid_reference DIR/test.tgt"));
    assert!(told.contains("valid.src\" has 13 lines") && told.contains("test.tgt\" has 11"), "{told}");
    assert!(!task.path("save/latest").exists() && !task.path("log/metrics.jsonl").exists());
    task.passes(2, TRAIN);
}

#[test]
fn keys_and_flags_that_make_no_sense_are_told() {
    let task = Task::new();
    for (words, told) in [
        ("training_configs.updat_cycle 2", "training_configs.update_cycle"),
        ("training_configs.update_cycle 0", "update_cycle is 0"),
        ("model_configs.n_head 3", "d_model 16 cannot be split among 3 heads"),
        ("model_configs.model DL4MT", "model_configs.model is DL4MT; try Transformer"),
        ("training_configs.moving_average_method ema", "alpha is 0, expected a number between 0 and 1"),
        ("training_configs.bleu_valid_configs.sacrebleu_args -x", "-x"),
        ("optimizer_configs.schedule_method linear", "decay_steps is not given"),
    ] {
        let text = refused(&task, &format!("{TRAIN} {words}"));
        assert!(text.contains(told), "{words}: {text}");
    }
    let text = std::fs::read_to_string(task.path("nmt.yaml")).unwrap();
    std::fs::write(task.path("nmt.yaml"), text.replace("  shuffle:", "  shufle:")).unwrap();
    let told = refused(&task, TRAIN);
    assert!(
        told.contains("shufle") && told.contains("training_configs.shuffle") && told.contains("nmt.yaml"),
        "{told}"
    );
}

#[test]
fn a_checkpoint_of_other_sizes_is_refused_and_stays() {
    let task = Task::new();
    task.passes(2, TRAIN);
    let read = || std::fs::read(task.path("save/latest/model.safetensors")).unwrap();
    let before = read();
    let wider = "model_configs.d_model 32 model_configs.d_word_vec 32";
    let told = refused(&task, &format!("nmt --config_path DIR/nmt.yaml --reload {wider}"));
    assert!(
        told.contains("cannot go on from") && told.contains("has shape [32, 16] in the checkpoint"),
        "{told}"
    );
    assert_eq!(read(), before);
    let config = task.read("save/config.yaml");
    std::fs::write(
        task.path("wide.yaml"),
        config.replace("d_model: 16", "d_model: 32").replace("d_word_vec: 16", "d_word_vec: 32"),
    )
    .unwrap();
    let translate = "translate --model DIR/save --source DIR/test.src --out DIR/out.txt";
    let told = refused(&task, &format!("{translate} --config DIR/wide.yaml"));
    assert!(told.contains("save/best/model.safetensors") && told.contains("is [32, 16]"), "{told}");
    let told = refused(&task, &translate.replace("DIR/save", "DIR/nothing"));
    assert!(told.contains("config.yaml") && told.contains("try --config"), "{told}");
    let told = refused(&task, &translate.replace("DIR/test.src", "DIR/none.src"));
    assert!(told.contains("none.src"), "{told}");
    assert!(!task.path("out.txt").exists());
    task.passes(2, translate);
}
