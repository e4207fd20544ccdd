//! Runs that fail: rank 0 reports the reason once, all ranks exit, and nothing is lost.

use std::fs;
use std::path::Path;

use drumline_launch::Exit;
use drumline_text::synth_text::SynthTextOptions;

use super::running::{BUILT, Place, Rank, column, ended, start};

const SMALL_TEXTS: SynthTextOptions = SynthTextOptions { train: 90, dev: 21, test: 10, seed: 3 };

/// The error of rank 0, for a failure that all ranks share.
pub(super) fn shared(ranks: &[Rank]) -> &str {
    for rank in ranks {
        assert_eq!(rank.exit, Exit::Code(1), "{}{}", rank.stdout, rank.stderr);
    }
    assert_eq!(ranks[1].stderr, "", "only rank 0 prints an error that all ranks share");
    let said = &ranks[0].stderr;
    assert!(said.starts_with("error: ") && said.matches("error: ").count() == 1, "{said}");
    said
}

#[test]
fn bad_input_is_reported_once_by_rank_0() {
    for (words, expected) in [
        ("train TRAIN.DATASET /no/such/folder", "TRAIN.DATASET: no data set in /no/such/folder"),
        ("train TRAIN.BATCHSIZE 3", "unknown key TRAIN.BATCHSIZE; try TRAIN.BATCH_SIZE"),
        ("train TRAIN.BATCH_SIZE many", "TRAIN.BATCH_SIZE: expected a whole number, got many"),
        ("train MODEL.ARCH resnet19", "resnet19"),
        ("train MODEL.NUM_CLASSES 100", "100"),
        ("train MODEL.WEIGHTS /no/such/file", "MODEL.WEIGHTS: no file /no/such/file"),
        ("train OUT_DIR /proc/none", "cannot write to OUT_DIR /proc/none"),
        ("test", "no checkpoint in"),
    ] {
        let place = Place::new();
        let ranks = place.run(2, words);
        let said = shared(&ranks);
        assert!(said.contains(expected), "{words}: {said}");
    }
}

/// The output of one process with `--check`.
fn checked(place: &Place, words: &str) -> Rank {
    let cfg = place.path("c.yaml").display().to_string();
    let (command, pairs) = words.split_once(' ').unwrap_or((words, ""));
    let args = ["--check", command, "--cfg", &cfg].into_iter().chain(pairs.split_whitespace());
    ended(start(1, args.map(str::to_owned).collect())).remove(0)
}

#[test]
fn errors_are_found_before_ranks_are_started() {
    let place = Place::new();
    for (words, expected) in [
        ("train TRAIN.DATASET /no/such/folder", "TRAIN.DATASET: no data set in /no/such/folder"),
        ("train TRAIN.BATCHSIZE 3", "unknown key TRAIN.BATCHSIZE; try TRAIN.BATCH_SIZE"),
        ("train MODEL.ARCH resnet19", "resnet19"),
        ("train MODEL.WEIGHTS /no/such/file", "MODEL.WEIGHTS: no file /no/such/file"),
        ("train OUT_DIR /proc/none", "cannot write to OUT_DIR /proc/none"),
        ("test TEST.DATASET /no/such/folder", "TEST.DATASET: no data set in /no/such/folder"),
        ("test", "no checkpoint in"),
    ] {
        let rank = checked(&place, words);
        assert_eq!((rank.exit, rank.stdout.as_str()), (Exit::Code(1), ""), "{words}");
        assert!(
            rank.stderr.contains(expected) && rank.stderr.matches("error: ").count() == 1,
            "{words}: {}",
            rank.stderr
        );
    }
    let weights = place.path("weights.safetensors");
    fs::write(&weights, "").unwrap();
    for words in ["train", &format!("test MODEL.WEIGHTS {}", weights.display())] {
        let rank = checked(&place, words);
        assert_eq!(
            (rank.exit, rank.stdout.as_str(), rank.stderr.as_str()),
            (Exit::Code(0), "", ""),
            "{words}"
        );
    }
    let left: Vec<_> = fs::read_dir(place.path("exp")).unwrap().collect();
    assert!(left.is_empty(), "nothing was trained: {left:?}");
}

#[test]
fn a_disk_that_is_full_is_left_as_it_was() {
    let place = Place::new();
    let (cfg, exp) = (place.path("c.yaml"), place.path("exp"));
    // The file size limit is 0: a file can be created, but not written.
    let script = "trap '' XFSZ; ulimit -f 0; exec \"$0\" --check train --cfg \"$1\"";
    let full = std::process::Command::new("sh").args(["-c", script, BUILT]).arg(cfg).output().unwrap();
    let said = String::from_utf8_lossy(&full.stderr);
    assert!(!full.status.success() && said.contains("cannot write to OUT_DIR"), "{said}");
    assert_eq!(fs::read_dir(exp).unwrap().count(), 0, "{said}");
}

#[test]
fn what_is_said_of_the_command_line_is_said_by_rank_0() {
    for (word, code, expected) in [("trian", 2, "unrecognized subcommand 'trian'"), ("--help", 0, "Usage: ")]
    {
        let ranks = ended(start(2, vec![word.to_owned()]));
        let said = ranks.iter().map(|rank| format!("{}{}", rank.stdout, rank.stderr)).collect::<Vec<_>>();
        assert!(said[0].contains(expected) && said[1].is_empty(), "{word}: {said:?}");
        // Each rank finds the error by itself: a rank that starts late may be stopped before it does.
        let late = if code == 0 { Exit::Code(0) } else { Exit::StoppedByUs };
        let exits = [ranks[0].exit, ranks[1].exit];
        assert!(
            exits[0] == Exit::Code(code) && [Exit::Code(code), late].contains(&exits[1]),
            "{word}: {exits:?}"
        );
    }
}

#[test]
fn bad_files_are_reported_once_by_rank_0() {
    let place = Place::new();
    let data = place.path("data/test_batch.bin");
    let whole = fs::read(&data).unwrap();
    fs::write(&data, &whole[..whole.len() - 5]).unwrap();
    let ranks = place.run(2, "train");
    assert!(shared(&ranks).contains("test_batch.bin"), "{}", ranks[0].stderr);
    fs::write(&data, &whole).unwrap();
    fs::write(place.path("c.yaml"), "TRAIN: [\n").unwrap();
    let ranks = place.run(2, "train");
    assert!(shared(&ranks).contains("c.yaml:"), "{}", ranks[0].stderr);
}

#[test]
fn files_that_cannot_be_written_or_read_are_reported_once_by_rank_0() {
    let place = Place::new();
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let ranks = place.run(2, "test TEST.PREDICTIONS /proc/none/predictions.csv");
    assert!(shared(&ranks).contains("/proc/none"), "{}", ranks[0].stderr);
    assert!(!ranks[0].stdout.contains("== test:"), "found before the work: {}", ranks[0].stdout);
    for saved in fs::read_dir(place.path("exp/checkpoints")).unwrap() {
        let weights = saved.unwrap().path().join("model.safetensors");
        if weights.is_file() {
            fs::write(weights, "not a checkpoint").unwrap();
        }
    }
    let ranks = place.run(2, "train");
    let said = &ranks[0].stderr;
    assert!(said.contains("no checkpoint in") && said.contains("can be used"), "{said}");
    assert_eq!(ranks[1].stderr, "", "only rank 0 prints");
}

#[test]
fn checkpoints_that_were_found_damaged_are_not_called_missing() {
    let place = Place::new();
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let folder = place.path("exp/checkpoints");
    for saved in fs::read_dir(&folder).unwrap() {
        let path = saved.unwrap().path();
        if path.is_symlink() {
            fs::remove_file(path).unwrap();
        } else {
            let name = path.file_name().unwrap().to_str().unwrap();
            fs::rename(&path, folder.join(format!("bad-{name}"))).unwrap();
        }
    }
    let ranks = place.run(2, "test");
    let said = shared(&ranks);
    assert!(said.contains("it was found damaged before") && !said.contains("try MODEL.WEIGHTS"), "{said}");
}

#[test]
fn a_refused_run_leaves_the_configuration_of_the_one_before() {
    let place = Place::new();
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let saved = fs::read_to_string(place.path("exp/config.yaml")).unwrap();
    let ranks = place.run(2, "train MODEL.ARCH convnet");
    assert!(shared(&ranks).contains("the checkpoint is of another model"), "{}", ranks[0].stderr);
    assert_eq!(fs::read_to_string(place.path("exp/config.yaml")).unwrap(), saved);
}

#[test]
fn what_was_trained_is_tested_not_what_it_began_with() {
    let place = Place::new();
    place.passes(1, "train TRAIN.MAX_STEPS 2");
    let weights = fs::canonicalize(place.path("exp/checkpoints/latest")).unwrap().join("model.safetensors");
    let (given, fine) = (format!("MODEL.WEIGHTS {}", weights.display()), place.path("fine"));
    let new = format!("{given} MODEL.NEW_CLASSIFIER True OUT_DIR {}", fine.display());
    place.passes(1, &format!("train {new}"));
    fs::copy(fine.join("config.yaml"), place.path("c.yaml")).unwrap();
    let said = place.passes(1, "test");
    assert!(said.contains("fine/checkpoints"), "{said}");
    let ranks = place.run(2, &format!("test {given}"));
    assert!(shared(&ranks).contains("MODEL.NEW_CLASSIFIER is True"), "{}", ranks[0].stderr);
    let said = place.passes(1, &format!("test {given} MODEL.NEW_CLASSIFIER False"));
    assert!(said.contains("exp/checkpoints"), "control: {said}");
}

#[test]
fn a_damaged_checkpoint_is_reported_and_the_previous_one_is_used() {
    let place = Place::new();
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    place.passes(2, "train TRAIN.MAX_STEPS 4");
    let latest = fs::canonicalize(place.path("exp/checkpoints/latest")).unwrap();
    fs::write(latest.join("model.safetensors"), "not a checkpoint").unwrap();
    let ranks = place.run(2, "train TRAIN.MAX_STEPS 5");
    assert!(ranks.iter().all(|rank| rank.exit.is_success()), "{}", ranks[0].stderr);
    assert!(ranks[0].stdout.contains("[resume] == after step 2"), "{}", ranks[0].stdout);
    assert_eq!(ranks[0].stderr.matches("model.safetensors is damaged").count(), 1, "{}", ranks[0].stderr);
    assert_eq!(ranks[1].stderr, "");
    let log = fs::read_to_string(place.path("exp/log.txt")).unwrap();
    assert_eq!(log.matches("model.safetensors is damaged").count(), 1, "{log}");
    assert!(log.contains("bad-step-00000004"), "{log}");
}

/// Flips a bit of a checkpoint's weights.
fn flip(checkpoint: &Path) {
    let file = checkpoint.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

/// The checkpoints of a run, and its links with their targets.
fn kept(place: &Place) -> Vec<String> {
    let folder = place.path("exp/checkpoints");
    let entries = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap());
    let mut names: Vec<_> = entries
        .map(|entry| match fs::read_link(entry.path()) {
            Ok(to) => format!("{} -> {}", entry.file_name().display(), to.display()),
            Err(_) => entry.file_name().display().to_string(),
        })
        .collect();
    names.sort();
    names
}

#[test]
fn a_damaged_checkpoint_does_not_displace_a_good_one() {
    // 5 steps per epoch, with a checkpoint at the end of each epoch.
    let place = Place::new();
    place.passes(2, "train OPTIM.MAX_EPOCH 3");
    let checkpoints = place.path("exp/checkpoints");
    let [before, last] = ["step-00000010", "step-00000015"];
    flip(&checkpoints.join(last));
    place.passes(2, "train OPTIM.MAX_EPOCH 3");
    assert!(checkpoints.join(before).is_dir() && checkpoints.join(last).is_dir(), "{:?}", kept(&place));
    assert!(checkpoints.join("bad-step-00000015").is_dir(), "{:?}", kept(&place));
    // The second one is damaged too.
    flip(&checkpoints.join(last));
    let said = place.passes(2, "train OPTIM.MAX_EPOCH 3");
    assert!(said.contains("[resume] == after step 10"), "{said}");
    place.passes(2, "test");
}

#[test]
fn a_damaged_best_is_replaced_by_the_best_good_one() {
    let place = Place::of_texts("classify", &SMALL_TEXTS);
    // A larger loss counts as better here: the first epoch has the largest, and later epochs are worse.
    place.passes(2, "train TRAIN.METRIC_KEY loss OPTIM.MAX_EPOCH 3");
    let best = fs::canonicalize(place.path("exp/checkpoints/best")).unwrap();
    assert_ne!(best, fs::canonicalize(place.path("exp/checkpoints/latest")).unwrap(), "control");
    flip(&best);
    let ranks = place.run(2, "test TRAIN.METRIC_KEY loss");
    assert!(
        ranks[0].stderr.contains("is damaged") && best.is_dir(),
        "who tests renames nothing: {}",
        ranks[0].stderr
    );
    place.passes(2, "train TRAIN.METRIC_KEY loss OPTIM.MAX_EPOCH 6");
    let good = fs::canonicalize(place.path("exp/checkpoints/best")).unwrap();
    assert!(good.is_dir() && good != best && !best.is_dir(), "{:?}", kept(&place));
    let said = place.passes(2, "test TRAIN.METRIC_KEY loss");
    assert!(said.contains(&format!("best model, {}", good.display())), "{said}");
    let events = place.events();
    let resumed = events.iter().rfind(|event| event["kind"] == "run").unwrap();
    let step = resumed["best"]["step"].as_u64().unwrap();
    assert!(good.ends_with(format!("step-{step:08}")), "programs that list runs know it too: {resumed}");
}

#[test]
fn another_data_set_is_refused_unless_it_is_accepted() {
    let place = Place::new();
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let other = Place::of_images(36, 21);
    let other = format!("train TRAIN.DATASET {}", other.path("data").display());
    let ranks = place.run(2, &other);
    let said = shared(&ranks);
    assert!(said.contains("of a data set of 40 samples with fingerprint "), "{said}");
    assert!(
        said.contains("but this one has 36 samples") && said.contains("TRAIN.ACCEPT_NEW_DATA True"),
        "{said}"
    );
    let said = place.passes(2, &format!("{other} TRAIN.ACCEPT_NEW_DATA True"));
    assert!(said.contains("after step 2"), "{said}");
}

#[test]
fn a_nan_loss_stops_all_ranks_and_keeps_the_checkpoint() {
    let place = Place::new();
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let ranks = place.run(2, "train OPTIM.BASE_LR 1e38");
    let said = shared(&ranks);
    for words in [
        "the loss is ",
        " at step ",
        "batch ",
        "lr 1",
        "the checkpoint after step 2 is kept",
        "try a smaller OPTIM.BASE_LR",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let events = place.events();
    assert!(column(&events, "step", "loss").last().unwrap().is_nan());
    let end = events.last().unwrap();
    assert_eq!((&end["kind"], &end["reason"]), (&"end".into(), &"failed".into()));
    assert!(end["error"].as_str().unwrap().contains("the loss is "), "{end}");
    let said = place.passes(2, "train");
    assert!(said.contains("after step 2"), "control: the run resumes there: {said}");
}
