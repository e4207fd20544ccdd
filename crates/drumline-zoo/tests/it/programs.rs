//! Runs that succeed: what they print and write, and how they resume.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use drumline_launch::Signal;
use drumline_zoo::config::DeviceKind;
use drumline_zoo::images::ImageConfig;
use rustix::process::{Pid, kill_process};

use super::running::{Place, column, ended};

#[test]
fn two_ranks_train_and_rank_0_alone_speaks() {
    let place = Place::new();
    let ranks = place.run(2, "train");
    assert!(ranks.iter().all(|rank| rank.exit.is_success()), "{}{}", ranks[0].stderr, ranks[1].stderr);
    assert_eq!(ranks[1].stdout, "[init] == local rank: 1, global rank: 1 ==\n");
    let said = &ranks[0].stdout;
    for words in [
        "[init] == local rank: 0, global rank: 0 ==",
        "=  Training  =",
        "   == step: [2/5] [1/2] | loss: ",
        "Training Finished",
    ] {
        assert_eq!(said.matches(words).count(), 1, "{words}: {said}");
    }
    let events = place.events();
    assert_eq!((events[0]["kind"].as_str(), events[0]["world_size"].as_u64()), (Some("run"), Some(2)));
    assert_eq!(events[0]["config"]["MODEL.ARCH"], "mlp");
    assert_eq!(events[0]["config"]["batch_size_per_gpu"], 4);
    let steps: Vec<_> = (1..=10).map(f64::from).collect();
    assert_eq!(column(&events, "step", "step"), steps);
    assert_eq!(column(&events, "step", "samples"), [8.0; 10]);
    assert_eq!(column(&events, "eval", "samples"), [21.0; 2], "each test image counts once");
    let end = events.last().unwrap();
    assert_eq!(
        (&end["kind"], &end["reason"], end["step"].as_u64()),
        (&"end".into(), &"finished".into(), Some(10))
    );
    assert!(end["error"].is_null() && end["time"].as_u64() >= events[0]["time"].as_u64());
    let config = ImageConfig::load::<&str>(Some(&place.path("exp/config.yaml")), &[]).unwrap();
    assert_eq!((config.model.arch.as_str(), config.shared.run.rng_seed), ("mlp", Some(7)));

    let again = place.passes(2, "train");
    assert!(again.contains("nothing left to do after step 10, 2 epochs"), "{again}");
    assert_eq!(place.events().len(), events.len());

    let tested = place.passes(2, "test --last TEST.PRINT_FREQ 2");
    assert_eq!(tested.matches("   == eval: [").count(), 2, "4 batches of rank 0: {tested}");
    let [loss, acc1] = ["loss", "acc1"].map(|key| column(&events, "eval", key));
    let line = format!("== test: loss: {:.4} | Acc@1 {:.3} | ", loss[1], acc1[1]);
    assert!(tested.contains(&line) && tested.contains("| 21 images | last model, "), "{line}: {tested}");
    let best = if acc1[1] > acc1[0] { 1 } else { 0 };
    let tested = place.passes(1, "test");
    let line = format!("== test: loss: {:.4} | Acc@1 {:.3} | ", loss[best], acc1[best]);
    assert!(tested.contains(&line) && tested.contains("| best model, "), "{line}: {tested}");
}

#[test]
fn help_names_the_program_that_was_called() {
    let help = |name: &str| {
        let mut program = Command::new(env!("CARGO_BIN_EXE_drumline-train"));
        let said = program.arg0(name).args(["data", "tokens", "--help"]).output().unwrap();
        String::from_utf8(said.stdout).unwrap()
    };
    assert!(help("drumline").contains("Usage: drumline data tokens "));
    assert!(help("./drumline-train").contains("Usage: drumline-train data tokens "));
}

#[test]
fn a_run_can_be_looked_at() {
    let place = Place::new();
    place.passes(2, "train TRAIN.TRACE_STEPS 2 TRAIN.ACCUMULATE 2 TEST.PRINT_FREQ 2");
    let events = place.events();
    assert_eq!(column(&events, "step", "samples"), [16.0, 16.0, 8.0, 16.0, 16.0, 8.0], "two batches a step");
    assert!(
        column(&events, "step", "acc1")
            .iter()
            .chain(&column(&events, "eval", "acc5"))
            .all(|acc| *acc <= 100.0)
    );
    let ranks = drumline_observe::status::read(&place.path("exp"));
    let status: Vec<_> = ranks.iter().map(|rank| (rank.rank, rank.step, rank.state)).collect();
    assert_eq!(status, [0, 1].map(|rank| (rank, 6, drumline_observe::status::State::Ended)));
    assert_eq!(std::fs::read_dir(place.path("exp/tensorboard")).unwrap().count(), 1);
    let log = std::fs::read_to_string(place.path("exp/log.txt")).unwrap();
    assert!(log.contains("=  Training  =") && log.contains("== eval: [2/2] | loss: "), "{log}");
    assert_eq!(log.matches("Training Finished").count(), 1, "{log}");
    let trace = std::fs::read_to_string(place.path("exp/trace/rank-00001.json")).unwrap();
    assert_eq!(
        trace.matches("\"optimizer\"").count(),
        1,
        "steps 6 and 7, of which the 6th is the last: {trace}"
    );
    place.passes(1, "train TRAIN.TENSORBOARD False TRAIN.AUTO_RESUME False OPTIM.MAX_EPOCH 1");
    assert_eq!(std::fs::read_dir(place.path("exp/tensorboard")).unwrap().count(), 1, "control");
}

/// A small image, in the colour of its class.
fn write_image(path: &std::path::Path, class: u8) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    image::RgbImage::from_pixel(40, 36, image::Rgb([class * 120, 200 - class * 90, 60])).save(path).unwrap();
}

#[test]
fn folders_of_images_cifar_100_and_dummy_input_train_and_test() {
    let place = Place::new();
    for (number, name) in ["a.jpg", "b.png", "c.jpeg", "d.png", "e.jpg"].iter().enumerate() {
        for (class, folder) in ["cat", "dog"].iter().enumerate() {
            for split in ["train", "val"].iter().take(if number < 3 { 2 } else { 1 }) {
                write_image(&place.path(&format!("images/{split}/{folder}/{name}")), class as u8);
            }
        }
    }
    let images =
        format!("MODEL.NUM_CLASSES 2 MODEL.ARCH convnet TRAIN.DATASET {}", place.path("images").display());
    place.passes(2, &format!("train {images} OUT_DIR {}", place.path("folder").display()));
    std::fs::remove_dir_all(place.path("images/train")).unwrap();
    let said = place.passes(2, &format!("test {images} OUT_DIR {}", place.path("folder").display()));
    assert!(said.contains("| 6 images |"), "the training set is not needed to test: {said}");

    // Records of CIFAR-100 have one more byte for the coarse label.
    let coarse = |name: &str, to: &str| {
        let records = std::fs::read(place.path("data").join(name)).unwrap();
        let with_group: Vec<u8> = records.chunks(3073).flat_map(|record| [&[0], record].concat()).collect();
        std::fs::create_dir_all(place.path("hundred")).unwrap();
        std::fs::write(place.path("hundred").join(to), with_group).unwrap();
    };
    coarse("data_batch_1.bin", "train.bin");
    coarse("test_batch.bin", "test.bin");
    let hundred = format!(
        "MODEL.NUM_CLASSES 100 TRAIN.DATASET {} OUT_DIR {}",
        place.path("hundred").display(),
        place.path("c100").display()
    );
    place.passes(2, &format!("train {hundred} OPTIM.MAX_EPOCH 1"));
    assert!(place.passes(2, &format!("test {hundred}")).contains("| 21 images |"));
    let dummy = place.passes(2, "train MODEL.DUMMY_INPUT True TRAIN.MAX_STEPS 2 MODEL.NUM_CLASSES 10");
    assert!(dummy.contains("Training Finished"), "{dummy}");
}

#[test]
fn predictions_of_all_ranks_are_written_once_in_the_data_sets_order() {
    let place = Place::new();
    place.passes(2, "train TRAIN.MAX_STEPS 2");
    let read = |ranks, file: &str| {
        let words = format!("test TEST.PREDICTIONS {}", place.path(file).display());
        let said = place.passes(ranks, &words);
        (said, std::fs::read_to_string(place.path(file)).unwrap())
    };
    let (said, two) = read(2, "two.csv");
    let (_, three) = read(3, "three.csv");
    // The last digits of probabilities depend on the batch size.
    let without_probability = |text: &str| -> Vec<String> {
        text.lines().filter_map(|line| Some(line.rsplit_once(',')?.0.to_owned())).collect()
    };
    assert_eq!(without_probability(&two), without_probability(&three), "the same rows whoever made them");
    let lines: Vec<Vec<&str>> = two.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(lines[0], ["index", "label", "predicted", "probability"]);
    let indices: Vec<usize> = lines[1..].iter().map(|row| row[0].parse().unwrap()).collect();
    assert_eq!(indices, (0..21).collect::<Vec<_>>());
    let right = lines[1..].iter().filter(|row| row[1] == row[2]).count();
    assert!(said.contains(&format!("Acc@1 {:.3} |", 100.0 * right as f64 / 21.0)), "{said}");
    let (_, json) = read(1, "one.jsonl");
    assert!(json.lines().count() == 21 && json.starts_with("{\"index\":0,\"label\":"), "{json}");
}

#[test]
fn a_run_in_two_parts_is_the_same_as_one() {
    let (whole, parts) = (Place::new(), Place::new());
    whole.passes(1, "train");
    parts.passes(1, "train TRAIN.MAX_STEPS 3");
    let said = parts.passes(1, "train");
    assert!(said.contains("[resume] == after step 3, epoch 1 =="), "{said}");
    let (whole, parts) = (whole.events(), parts.events());
    assert_eq!(column(&whole, "step", "step"), column(&parts, "step", "step"));
    assert_eq!(column(&whole, "step", "loss"), column(&parts, "step", "loss"), "bit for bit");
    assert_eq!(column(&parts, "run", "step"), [0.0, 3.0]);
}

#[test]
fn a_signal_to_one_rank_stops_all_after_a_checkpoint() {
    let place = Place::new();
    let job = place.start(2, "train OPTIM.MAX_EPOCH 100000");
    job.wait_for_line(0, "== step:", Instant::now() + Duration::from_secs(120)).unwrap();
    job.signal(1, Signal::TERM).unwrap();
    let ranks = ended(job);
    assert!(ranks.iter().all(|rank| rank.exit.is_success()), "{}{}", ranks[0].stderr, ranks[1].stderr);
    assert!(ranks[0].stdout.contains("[stop] == asked to stop after step"), "{}", ranks[0].stdout);
    assert_eq!(place.events().last().unwrap()["reason"], "stopped");
    let last = *column(&place.events(), "step", "step").last().unwrap();
    assert!(place.path(&format!("exp/checkpoints/step-{:08}", last as u64)).is_dir());
    let said = place.passes(1, &format!("train OPTIM.MAX_EPOCH 100000 TRAIN.MAX_STEPS {}", last as u64 + 2));
    assert!(said.contains(&format!("after step {last}")), "on another number of ranks: {said}");
}

#[test]
fn a_single_rank_locks_its_folder_and_exits_with_the_signal_code() {
    let place = Place::new();
    let mut command = Command::new(env!("CARGO_BIN_EXE_drumline-train"));
    command.args(["train", "--cfg"]).arg(place.path("c.yaml")).args(["OPTIM.MAX_EPOCH", "100000"]);
    // The way `drumline train` starts it.
    command.envs(["RANK", "LOCAL_RANK"].map(|name| (name, "0")));
    command.envs(["WORLD_SIZE", "LOCAL_WORLD_SIZE", "DRUMLINE_ALONE"].map(|name| (name, "1")));
    let mut alone = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(alone.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("== step:")));
    let second = place.run(2, "train");
    let (said, busy) = (&second[0].stderr, format!("another run (pid {}) writes to OUT_DIR", alone.id()));
    assert!(
        said.starts_with(&format!("note: {busy}")) && said.contains("; waiting for its end for up to 10s\n"),
        "{said}"
    );
    assert!(said.contains(&format!("error: rank 0: {busy}")) && said.contains("; try another"), "{said}");
    assert_eq!((said.lines().count(), second[1].stderr.as_str()), (2, ""), "{said}");
    kill_process(Pid::from_child(&alone), Signal::TERM).unwrap();
    assert!(lines.any(|line| line.unwrap().contains("[stop] == asked to stop after step")));
    assert_eq!(alone.wait().unwrap().code(), Some(143), "one of a launcher ends with 0: the test above");
    let last = *column(&place.events(), "step", "step").last().unwrap() as u64;
    let said = place.passes(2, &format!("train OPTIM.MAX_EPOCH 100000 TRAIN.MAX_STEPS {}", last + 1));
    assert!(said.contains(&format!("after step {last}")), "the folder is free again: {said}");
}

#[test]
fn images_on_the_device_give_the_same_training() {
    let (host, device) = (Place::new(), Place::new());
    let words = "train MODEL.ARCH convnet MODEL.SYNCBN True TRAIN.WORKERS 2";
    let said = host.passes(2, words);
    assert!(!said.contains("[data]"), "{said}");
    let words = format!("{words} DATA.ON_DEVICE true");
    let said = device.passes(2, &format!("{words} TRAIN.MAX_STEPS 3"));
    assert_eq!(said.matches("[data] == images are kept as one tensor, 1 MB ==").count(), 1, "{said}");
    assert!(device.passes(2, &words).contains("[resume] == after step 3"));
    let (host_events, device_events) = (host.events(), device.events());
    for (kind, key) in [("step", "loss"), ("step", "acc1"), ("eval", "acc1")] {
        let [a, mut b] = [&host_events, &device_events].map(|events| column(events, kind, key));
        // The stop in between was evaluated.
        b.drain(..usize::from(kind == "eval"));
        assert!(!a.is_empty());
        assert_eq!(a, b, "{kind} {key}, bit for bit");
    }
    let tests = [(&host, ""), (&device, "DATA.ON_DEVICE true")].map(|(place, key)| {
        // Only the last models are compared: the stop in between was evaluated too, and may be the best.
        let said = place.passes(1, &format!("test --last MODEL.ARCH convnet {key}"));
        said.lines().find(|line| line.contains("== test:")).unwrap().rsplit_once('|').unwrap().0.to_owned()
    });
    assert_eq!(tests[0], tests[1]);
}

#[test]
fn a_flag_for_the_device_wins_over_the_key() {
    let place = Place::new();
    let ranks = place.run(1, "train --device cpu TRAIN.MAX_STEPS 1 DEVICE cuda");
    assert!(ranks[0].exit.is_success(), "{}", ranks[0].stderr);
    let saved = ImageConfig::load::<&str>(Some(&place.path("exp/config.yaml")), &[]).unwrap();
    assert_eq!(saved.shared.run.device, DeviceKind::Cpu);
    let refused = &place.run(1, "train --device tpu")[0];
    assert!(refused.stderr.contains("expected auto, cpu or cuda"), "{}", refused.stderr);
}
