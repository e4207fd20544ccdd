//! Text classification and tagging with `drumline-train`: learning, several ranks, resuming, and errors.

use std::fs;
use std::path::Path;

use drumline::checkpoint::{Checkpoints, Mark};
use drumline::comm::LocalGroup;
use drumline_text::synth_text::SynthTextOptions;
use safetensors::SafeTensors;

use super::failing_runs::shared;
use super::running::{Place, column, ended, start_program};

const LARGE: SynthTextOptions = SynthTextOptions { train: 2500, dev: 201, test: 150, seed: 3 };
const SMALL: SynthTextOptions = SynthTextOptions { train: 90, dev: 21, test: 10, seed: 3 };

/// All weights of the last checkpoint.
pub(super) fn weights(place: &Place) -> Vec<f32> {
    let bytes = fs::read(place.path("exp/checkpoints/latest/model.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let mut names = tensors.names();
    names.sort();
    let values = |name: &str| -> Vec<f32> {
        tensors.tensor(name).unwrap().data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    names.into_iter().flat_map(values).collect()
}

#[test]
fn two_ranks_learn_to_classify_and_any_number_evaluates() {
    let place = Place::of_texts("classify", &LARGE);
    let said = place.passes(2, "train TRAIN.EARLY_STOP 3");
    for words in ["=  Training  =", "texts/s", "| f1_micro ", "| f1_macro ", "best acc ", "| 201 texts"] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let events = place.events();
    assert!(column(&events, "eval", "acc").into_iter().fold(0.0, f64::max) > 95.0, "{said}");
    assert_eq!(events[0]["config"]["TEXT.TASK"], "classify");
    assert!(fs::read_to_string(place.path("exp/vocab.json")).unwrap().contains("\"Wednesday\": ["));
    assert_eq!(
        fs::read_to_string(place.path("exp/labels.json")).unwrap(),
        "[\"negative\",\"neutral\",\"positive\"]\n"
    );
    // A test does not need the training file.
    fs::remove_file(place.path("data/train.csv")).unwrap();
    let line = |said: &str| said.lines().find(|line| line.contains("== test:")).unwrap().to_owned();
    let [one, three] = [1, 3].map(|ranks| {
        let said = place.run(ranks, "test TEST.BATCH_SIZE 7");
        // An evaluation draws no random numbers.
        assert!(
            said.iter().all(|rank| rank.exit.is_success() && rank.stderr.is_empty()),
            "{}",
            said[0].stderr
        );
        line(&said[0].stdout)
    });
    assert_eq!(one, three, "each text counts once");
    assert!(one.contains("| 150 texts |"), "{one}");
}

#[test]
fn two_ranks_learn_to_tag_with_both_nets() {
    for (net, words) in
        [("bilstm", ""), ("transformer", "MODEL.N_LAYERS 2 OPTIM.BASE_LR 0.003 OPTIM.MAX_EPOCH 8")]
    {
        let place = Place::of_texts("tag", &LARGE);
        let said = place.passes(2, &format!("train MODEL.NET {net} {words}"));
        let spans = column(&place.events(), "eval", "f1_span");
        assert!(spans.into_iter().fold(0.0, f64::max) > 95.0, "{said}");
        assert!(said.contains("best f1_span "), "{said}");
        assert!(place.passes(2, &format!("test MODEL.NET {net} {words}")).contains("== test: loss: "));
    }
}

#[test]
fn one_rank_and_two_make_the_same_steps() {
    for task in ["classify", "tag"] {
        let runs = [(1, 2), (2, 1)].map(|(ranks, accumulate)| {
            let place = Place::of_texts(task, &SMALL);
            let words = "OPTIM.METHOD sgd MODEL.DROPOUT 0 TRAIN.BATCH_SIZE 7";
            place.passes(ranks, &format!("train {words} TRAIN.ACCUMULATE {accumulate}"));
            (weights(&place), place.events())
        });
        let [(one, one_events), (two, two_events)] = &runs;
        let far = one.iter().zip(two).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(one.len() == two.len() && far < 1e-5, "{task}: {far}");
        assert!(one.iter().any(|weight| weight.abs() > 1e-3));
        for (kind, key) in [("step", "loss"), ("step", "samples"), ("eval", "loss"), ("eval", "acc")] {
            let [one, two] = [one_events, two_events].map(|events| column(events, kind, key));
            let near = one.iter().zip(&two).all(|(a, b)| (a - b).abs() < 1e-4);
            assert!(one.len() == two.len() && near, "{task}, {kind} {key}: {one:?}, {two:?}");
        }
    }
}

#[test]
fn a_run_in_two_parts_is_the_same_as_one() {
    let words = "train OPTIM.SCHEDULE constant OPTIM.WARMUP 4 OPTIM.GRAD_CLIP 1.0 MODEL.DROPOUT 0.3";
    let (whole, parts) = (Place::of_texts("classify", &SMALL), Place::of_texts("classify", &SMALL));
    whole.passes(2, words);
    parts.passes(2, &format!("{words} TRAIN.MAX_STEPS 4"));
    let said = parts.passes(2, words);
    assert!(said.contains("[resume] == after step 4, epoch 2 =="), "{said}");
    let [one, two] = [&whole, &parts].map(|place| column(&place.events(), "step", "loss"));
    assert_eq!(one, two, "bit for bit");
    assert_eq!(weights(&whole), weights(&parts));
    let again = parts.passes(2, words);
    assert!(again.contains("nothing left to do after step 12, 4 epochs; best acc"), "{again}");
}

#[test]
fn a_resumed_run_keeps_its_vocabulary() {
    let place = Place::of_texts("classify", &SMALL);
    place.passes(2, "train TRAIN.MAX_STEPS 4");
    let words = fs::read(place.path("exp/vocab.json")).unwrap();
    let ranks = place.run(1, "train TEXT.MIN_COUNT 5");
    assert!(ranks[0].exit.is_success(), "{}", ranks[0].stderr);
    let dropped = "was saved by 2 ranks and is loaded by 1: the random numbers of rank 1 are dropped";
    assert_eq!(ranks[0].stderr.matches(dropped).count(), 1, "{}", ranks[0].stderr);
    assert_eq!(fs::read(place.path("exp/vocab.json")).unwrap(), words);
    place.passes(1, "train TEXT.MIN_COUNT 5 TRAIN.AUTO_RESUME False");
    assert_ne!(fs::read(place.path("exp/vocab.json")).unwrap(), words, "control");
}

#[test]
fn a_refused_run_leaves_the_words_and_labels_of_the_one_before() {
    let place = Place::of_texts("classify", &SMALL);
    let read = || ["vocab.json", "labels.json"].map(|name| fs::read(place.path("exp").join(name)).unwrap());
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let before = read();
    let dev = fs::read(place.path("data/dev.csv")).unwrap();
    append(&place.path("data/train.csv"), b"brandnew,fourth\n");
    append(&place.path("data/dev.csv"), b"well,mixed\n");
    let new_run = "train TRAIN.MAX_STEPS 2 TRAIN.AUTO_RESUME False";
    let ranks = place.run(2, new_run);
    assert!(shared(&ranks).contains("has the label `mixed`"), "{}", ranks[0].stderr);
    assert_eq!(read(), before);
    fs::write(place.path("data/dev.csv"), dev).unwrap();
    place.passes(2, new_run);
    assert_ne!(read(), before, "control");
}

#[test]
fn an_evaluation_that_is_missing_after_the_last_step_is_made() {
    let place = Place::of_texts("classify", &SMALL);
    let words = "train TRAIN.MAX_STEPS 5";
    place.passes(2, words);
    assert!(place.passes(2, words).contains("nothing left to do after step 5"), "control");
    // A signal during the evaluation leaves the checkpoint in this state.
    LocalGroup::run(1, |group| {
        let checkpoints = Checkpoints::new(place.path("exp/checkpoints"));
        let mut state = checkpoints.load_latest(&group).unwrap().unwrap().state;
        assert_eq!(state.trainer["evaluated_at"].take(), 5);
        checkpoints.save(&state, Mark::Latest, &group).unwrap();
        Ok(())
    })
    .unwrap();
    let said = place.passes(2, words);
    assert!(said.contains("== eval") && said.contains("Training Finished"), "{said}");
}

#[test]
fn the_best_model_is_tested_where_there_is_one() {
    let place = Place::of_texts("classify", &SMALL);
    // A larger loss counts as better here: it is that of the first epoch.
    place.passes(2, "train TRAIN.METRIC_KEY loss");
    let [best, last] =
        ["best", "latest"].map(|name| fs::read_link(place.path("exp/checkpoints").join(name)).unwrap());
    assert_ne!(best, last, "control");
    let said = place.passes(2, "test");
    assert!(
        said.contains(&format!("best model, {}", place.path("exp/checkpoints").join(&best).display())),
        "{said}"
    );
    // A run without evaluations has no best model, whatever an earlier run has left.
    place.passes(2, "train TEXT.DEV None TRAIN.AUTO_RESUME False");
    let said = place.passes(2, "test");
    assert!(said.contains("| last model, "), "{said}");
}

#[test]
fn early_stop_ends_it_and_without_dev_nothing_is_evaluated() {
    let place = Place::of_texts("tag", &SMALL);
    let said = place.passes(2, "train TRAIN.EARLY_STOP 2 OPTIM.BASE_LR 0 OPTIM.MAX_EPOCH 50");
    assert!(
        said.contains("Training Finished") && said.contains("early stop: no better f1_span in 2"),
        "{said}"
    );
    let place = Place::of_texts("tag", &SMALL);
    let said = place.passes(2, "train TEXT.DEV None OPTIM.METHOD adam OPTIM.MAX_EPOCH 1");
    assert!(said.contains("Training Finished") && !said.contains("== eval"), "{said}");
}

#[test]
fn another_training_file_in_a_used_folder_is_refused() {
    let place = Place::of_texts("classify", &SMALL);
    let file = place.path("data/train.csv");
    let before = fs::read(&file).unwrap();
    // The fourth step is the first of the second epoch.
    place.passes(2, "train TRAIN.MAX_STEPS 4");
    let kept = fs::read_link(place.path("exp/checkpoints/latest")).unwrap();
    append(&file, b"brandnew,positive\n");
    let ranks = place.run(2, "train");
    let said = shared(&ranks);
    assert!(
        said.contains("the position is of a data set of 90 samples with fingerprint ")
            && said.contains(", but this one has 91 samples with fingerprint "),
        "{said}"
    );
    append(&file, b"brandnew,fourth\n");
    let ranks = place.run(2, "train");
    let said = shared(&ranks);
    assert!(
        said.contains("line 93 of") && said.contains("has the label `fourth`, which the run in"),
        "{said}"
    );
    fs::write(&file, &before).unwrap();
    let ranks = place.run(2, "train TRAIN.BATCH_SIZE 9");
    assert!(
        shared(&ranks).contains("TRAIN.BATCH_SIZE was 16, and is 9 now, so batches would have other texts"),
        "{}",
        ranks[0].stderr
    );
    assert_eq!(fs::read_link(place.path("exp/checkpoints/latest")).unwrap(), kept);
    // At the end of an epoch, another file is accepted.
    let said = place.passes(2, "train TRAIN.MAX_STEPS 6");
    assert!(said.contains("after step 4"), "control: {said}");
    append(&file, b"brandnew,positive\n");
    let other = "train TRAIN.MAX_STEPS 9 TRAIN.BATCH_SIZE 9";
    let ranks = place.run(2, other);
    assert!(shared(&ranks).contains("TRAIN.ACCEPT_NEW_DATA True"), "{}", ranks[0].stderr);
    let said = place.passes(2, &format!("{other} TRAIN.ACCEPT_NEW_DATA True"));
    assert!(said.contains("after step 6"), "{said}");
}

#[test]
fn ranks_with_other_files_or_keys_are_refused_before_training() {
    let place = Place::of_texts("classify", &SMALL);
    let differing = |other: &str| {
        let train = format!(
            "{} train --cfg {}",
            env!("CARGO_BIN_EXE_drumline-train"),
            place.path("c.yaml").display()
        );
        let script = format!("if [ $RANK = 1 ]; then exec {train} {other}; else exec {train}; fi");
        let ranks = ended(start_program("sh", 2, vec!["-c".into(), script]));
        shared(&ranks).to_owned()
    };
    let error = differing("TRAIN.BATCH_SIZE 9");
    assert!(error.contains("another training than rank 0: TRAIN.BATCH_SIZE is 9, expected 16"), "{error}");
    let other = place.path("data/other.csv");
    fs::copy(place.path("data/dev.csv"), &other).unwrap();
    for key in ["TRAIN", "DEV"] {
        append(&other, b"one more,positive\n");
        let error = differing(&format!("TEXT.{key} {}", other.display()));
        let expected = format!("rank 1 was given another data set than rank 0: the text of TEXT.{key} is ");
        assert!(error.contains(&expected), "{error}");
    }
    fs::copy(place.path("data/dev.csv"), &other).unwrap();
    place.passes(2, &format!("train TRAIN.MAX_STEPS 1 TEXT.DEV {}", other.display()));
}

pub(super) fn append(path: &Path, bytes: &[u8]) {
    let content = fs::read(path).unwrap();
    fs::write(path, [&content, bytes].concat()).unwrap();
}

#[test]
fn bad_input_is_reported_once_by_rank_0_with_file_and_line() {
    type Spoil = fn(&Place);
    let nothing: Spoil = |_| {};
    let dev_label: Spoil = |place| append(&place.path("data/dev.csv"), b"well,mixed\n");
    let not_utf8: Spoil = |place| append(&place.path("data/train.csv"), b"\xff,positive\n");
    let dev_not_utf8: Spoil = |place| append(&place.path("data/dev.csv"), b"\xff,positive\n");
    let short: Spoil = |place| append(&place.path("data/train.csv"), b"alone\n");
    let one_label: Spoil = |place| fs::write(place.path("data/train.csv"), "text,label\na,b\n").unwrap();
    let empty: Spoil = |place| fs::write(place.path("data/train.csv"), "text,label\n ,b\n").unwrap();
    for (spoil, words, expected) in [
        (dev_label, "train", "line 23 of"),
        (
            dev_label,
            "train",
            "dev.csv\" has the label `mixed`, which the training data lacks; try one of: neg",
        ),
        (not_utf8, "train", "line 92 of"),
        (dev_not_utf8, "train", "line 23 of"),
        (short, "train", "line 92 of"),
        (one_label, "train", "has 1 label, expected at least two"),
        (empty, "train", "no sentences remain of"),
        (nothing, "train TEXT.TRAIN /no/such.csv", "TEXT.TRAIN: no file /no/such.csv; try"),
        (nothing, "train TEXT.DEV /no/such.csv", "TEXT.DEV: no file /no/such.csv; try"),
        (nothing, "train TEXT.LABEL lable", "line 1 of"),
        (nothing, "train TEXT.LABEL lable", "try another TEXT.LABEL, of: text, label; or TEXT.HEADERS, if"),
        (nothing, "train TEXT.FEILDS [text]", "unknown key TEXT.FEILDS; try TEXT.FIELDS"),
        (nothing, "train TRAIN.METRIC_KEY f2", "TRAIN.METRIC_KEY is f2; try one of"),
        (nothing, "train MODEL.NET cnn", "MODEL.NET: expected bilstm or transformer, got cnn"),
        (nothing, "train OUT_DIR /proc/none", "cannot write to OUT_DIR /proc/none"),
        (nothing, "test", "vocab.json\": No such file or directory (os error 2); try the OUT_DIR of a run"),
    ] {
        let place = Place::of_texts("classify", &SMALL);
        spoil(&place);
        let ranks = place.run(2, words);
        let said = shared(&ranks);
        assert!(said.contains(expected), "{words}: {said}");
    }
}

#[test]
fn empty_texts_and_unknown_words_are_accepted() {
    let place = Place::of_texts("classify", &SMALL);
    append(&place.path("data/train.csv"), b",positive\n\"  \",neutral\n");
    append(&place.path("data/dev.csv"), "<PAD> 两 never seen,positive\n".as_bytes());
    let said = place.passes(2, "train OPTIM.MAX_EPOCH 1");
    assert!(said.contains("note: 2 empty texts of ") && said.contains("| 22 texts"), "{said}");
}
