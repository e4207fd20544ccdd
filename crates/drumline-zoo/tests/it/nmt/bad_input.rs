//! Invalid input is reported once, with file and line, and nothing is lost.

use super::Task;

/// The error of all ranks, which one of them prints.
fn refused(task: &Task, words: &str) -> String {
    let ranks = task.run(2, words);
    assert!(ranks.iter().all(|rank| !rank.exit.is_success()), "{words}");
    let error: Vec<_> = ranks.iter().map(|rank| rank.stderr.as_str()).collect();
    assert!(error[1].is_empty() && !error[0].is_empty(), "{words}: {error:?}");
    error[0].to_owned()
}

const TRAIN: &str = "nmt --config_path DIR/nmt.yaml training_configs.max_steps 4";

#[test]
fn files_that_do_not_fit_are_named_with_their_lines() {
    let task = Task::new();
    let (source, target) = (task.read("train.src"), task.read("train.tgt"));
    std::fs::write(task.path("train.tgt"), target.lines().skip(1).collect::<Vec<_>>().join("\n")).unwrap();
    let error = refused(&task, TRAIN);
    assert!(error.contains("train.src\" has 100 lines") && error.contains("train.tgt\" has 99"), "{error}");

    std::fs::write(task.path("train.tgt"), &target).unwrap();
    let mut bytes = source.clone().into_bytes();
    let third = source.match_indices('\n').nth(1).unwrap().0 + 2;
    bytes[third] = 0xff;
    std::fs::write(task.path("train.src"), bytes).unwrap();
    let error = refused(&task, TRAIN);
    assert!(error.contains("line 3 of") && error.contains("train.src\" is not UTF-8"), "{error}");

    std::fs::write(task.path("train.src"), source).unwrap();
    std::fs::rename(task.path("vocab.tgt.json"), task.path("moved.json")).unwrap();
    let error = refused(&task, TRAIN);
    assert!(error.contains("cannot read the vocabulary") && error.contains("vocab.tgt.json"), "{error}");
    std::fs::rename(task.path("moved.json"), task.path("vocab.tgt.json")).unwrap();

    let error = refused(&task, &format!("{TRAIN} data_configs.bleu_valid_reference DIR/test.tgt"));
    assert!(error.contains("valid.src\" has 13 lines") && error.contains("test.tgt\" has 11"), "{error}");
    assert!(!task.path("save/latest").exists() && !task.path("log/metrics.jsonl").exists());
    task.passes(2, TRAIN);
}

#[test]
fn invalid_keys_and_flags_are_refused() {
    let task = Task::new();
    for (words, expected) in [
        ("training_configs.updat_cycle 2", "training_configs.update_cycle"),
        ("training_configs.update_cycle 0", "update_cycle is 0"),
        ("model_configs.n_head 3", "d_model 16 cannot be split among 3 heads"),
        ("model_configs.model DL4MT", "model_configs.model is DL4MT; try Transformer"),
        ("training_configs.moving_average_method ema", "alpha is 0, expected a number between 0 and 1"),
        ("training_configs.bleu_valid_configs.sacrebleu_args -x", "-x"),
        ("optimizer_configs.schedule_method linear", "decay_steps is not given"),
        ("model_configs.label_smoothing 1.5", "label_smoothing is 1.5; try 0 to below 1"),
        ("training_configs.num_kept_best_model 0", "num_kept_best_model is 0"),
        ("--save_to x", "there is no flag --save_to"),
    ] {
        let text = refused(&task, &format!("{TRAIN} {words}"));
        assert!(text.contains(expected), "{words}: {text}");
    }
    let text = std::fs::read_to_string(task.path("nmt.yaml")).unwrap();
    std::fs::write(task.path("nmt.yaml"), text.replace("  shuffle:", "  shufle:")).unwrap();
    let error = refused(&task, TRAIN);
    assert!(
        error.contains("shufle") && error.contains("training_configs.shuffle") && error.contains("nmt.yaml"),
        "{error}"
    );
}

#[test]
fn a_checkpoint_of_other_sizes_is_refused_and_stays() {
    let task = Task::new();
    task.passes(2, TRAIN);
    let read = || std::fs::read(task.path("save/latest/model.safetensors")).unwrap();
    let before = read();
    let wider = "model_configs.d_model 32 model_configs.d_word_vec 32";
    let error = refused(&task, &format!("nmt --config_path DIR/nmt.yaml --reload {wider}"));
    assert!(
        error.contains("cannot resume from") && error.contains("has shape [32, 16] in the checkpoint"),
        "{error}"
    );
    assert_eq!(read(), before);
    let config = task.read("save/config.yaml");
    std::fs::write(
        task.path("wide.yaml"),
        config.replace("d_model: 16", "d_model: 32").replace("d_word_vec: 16", "d_word_vec: 32"),
    )
    .unwrap();
    let translate = "translate --model DIR/save --source DIR/test.src --out DIR/out.txt";
    let error = refused(&task, &format!("{translate} --config DIR/wide.yaml"));
    assert!(
        error.contains("save/step-00000004/model.safetensors") && error.contains("is [32, 16]"),
        "{error}"
    );
    let error = refused(&task, &translate.replace("DIR/save", "DIR/nothing"));
    assert!(
        error.contains("no weights in ") && error.contains("the folder of a training's checkpoints"),
        "{error}"
    );
    let error = refused(&task, &translate.replace("DIR/test.src", "DIR/none.src"));
    assert!(error.contains("none.src"), "{error}");
    assert!(!task.path("out.txt").exists());
    task.passes(2, translate);
}

#[test]
fn a_mid_epoch_checkpoint_resumes_only_with_the_same_batches() {
    let task = Task::new();
    task.passes(2, TRAIN);
    let error = refused(&task, "nmt --config_path DIR/nmt.yaml --reload training_configs.batch_size 100");
    assert!(error.contains("training_configs.batch_size was 64, and is 100 now"), "{error}");
    task.passes(2, "nmt --config_path DIR/nmt.yaml --reload training_configs.update_cycle 2 training_configs.max_steps 6");
    let again = task.passes(2, "train --cfg DIR/nmt.yaml training_configs.max_steps 8");
    assert!(again.contains("[resume] == after step 6"), "drumline train resumes by itself: {again}");
}

/// Ranks of a job whose command lines differ, as if nodes had other files.
fn differing(task: &Task, words: &str, other: &str) -> String {
    let dir = task.folder.path().to_str().unwrap();
    let here = |words: &str| words.replace("DIR", dir);
    let script = format!(
        "if [ $RANK = 1 ]; then exec {0} {2}; else exec {0} {1}; fi",
        env!("CARGO_BIN_EXE_drumline-train"),
        here(words),
        here(other)
    );
    let ranks = super::ended(super::super::running::start_program("sh", 2, vec!["-c".into(), script]));
    assert!(ranks.iter().all(|rank| !rank.exit.is_success()), "{}", ranks[0].stdout);
    ranks[0].stderr.clone()
}

#[test]
fn ranks_with_other_settings_are_refused_before_training() {
    let task = Task::new();
    let error = differing(&task, TRAIN, &format!("{TRAIN} optimizer_configs.grad_clip 2.0"));
    assert!(
        error.contains("rank 1 was given another training than rank 0: optimizer_configs.grad_clip is 2"),
        "{error}"
    );
    let config = task.read("nmt.yaml").replace("vocab.tgt.json", "other.json");
    std::fs::write(task.path("other.yaml"), config).unwrap();
    let vocabulary = task.read("vocab.tgt.json");
    std::fs::write(task.path("other.json"), vocabulary.replace("}", " }")).unwrap();
    let error = differing(&task, TRAIN, &TRAIN.replace("nmt.yaml", "other.yaml"));
    assert!(error.contains("the vocabularies is "), "{error}");
    task.passes(2, TRAIN);
    let translate = "translate --model DIR/save --source DIR/test.src --out DIR/out.txt";
    let error = differing(&task, translate, &translate.replace("test.src", "valid.src"));
    assert!(error.contains("another task than rank 0: the text of the source is "), "{error}");
    let error = refused(&task, &translate.replace("DIR/out.txt", "DIR/log"));
    assert!(error.contains("log is a folder; try a file in it"), "{error}");
}

#[test]
fn a_model_keeps_its_vocabulary() {
    let task = Task::new();
    task.passes(2, TRAIN);
    let translate = "translate --model DIR/save --source DIR/test.src --out DIR/out.txt";
    task.passes(1, translate);
    let before = task.read("out.txt");
    // The same words with other ids.
    let words = task.read("vocab.tgt.json");
    let ids: std::collections::BTreeMap<String, (u32, u64)> = serde_json::from_str(&words).unwrap();
    let len = ids.len() as u32;
    let turned: std::collections::BTreeMap<_, _> =
        ids.into_iter().map(|(word, (id, count))| (word, ((id + 1) % len, count))).collect();
    std::fs::write(task.path("vocab.tgt.json"), serde_json::to_string(&turned).unwrap()).unwrap();
    let error = refused(
        &task,
        &format!("{TRAIN} --reload")
            .replace("training_configs.max_steps 4 --reload", "--reload training_configs.max_steps 6"),
    );
    assert!(
        error.contains("was trained with another vocabulary than data_configs.vocabularies; try those in"),
        "{error}"
    );
    // A run's folder contains its vocabulary, so it can be moved.
    std::fs::remove_file(task.path("vocab.src.json")).unwrap();
    std::fs::rename(task.path("save"), task.path("elsewhere")).unwrap();
    task.passes(1, &translate.replace("DIR/save", "DIR/elsewhere"));
    assert_eq!(task.read("out.txt"), before);
}

#[test]
fn a_vocabulary_is_counted_from_text() {
    let task = Task::new();
    let said = task.passes(1, "data vocabulary DIR/train.tgt DIR/valid.tgt --out DIR/counted.json");
    assert!(said.contains(" words and specials in "), "{said}");
    task.passes(1, "data vocabulary DIR/train.src --out DIR/counted.txt --max_n_words 30");
    let config = task
        .read("nmt.yaml")
        .replace("vocab.tgt.json", "counted.json")
        .replace("vocab.src.json", "counted.txt");
    std::fs::write(task.path("nmt.yaml"), config).unwrap();
    task.passes(2, TRAIN);
}
