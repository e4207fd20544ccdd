//! A damaged checkpoint is refused with the reason, renamed by its owner, and the one before is used.

use std::fs;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use drumline::checkpoint::{CheckpointError, Checkpoints, Mark};

use super::{alone, listing, load, save, state_of, whole_step};

const FILES: [&str; 4] = ["manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"];

/// Damages a file of step 2; the load must come to step 1 and say why.
fn falls_back(file: &str, reason: &str, damage: impl FnOnce(&Path)) {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    save(dir.path(), 2).unwrap();
    assert_eq!(whole_step(&load(dir.path()).unwrap().unwrap()), 2, "the control");
    damage(&dir.path().join("step-00000002").join(file));
    let loaded = load(dir.path()).unwrap().unwrap();
    assert_eq!(whole_step(&loaded), 1, "{file}: {reason}");
    let [refused] = &loaded.refused[..] else { panic!("{:?}", loaded.refused) };
    assert!(refused.path.ends_with("step-00000002"), "{refused}");
    assert!(refused.reason.contains(reason), "expected `{reason}`: {refused}");
    // A second restart knows.
    let again = load(dir.path()).unwrap().unwrap();
    assert_eq!((whole_step(&again), again.refused.len()), (1, 0));
    assert_eq!(fs::read_link(dir.path().join("latest")).unwrap(), Path::new("step-00000001"));
    assert!(!dir.path().join("step-00000002").exists());
}

fn edit(edit: impl FnOnce(&mut Vec<u8>)) -> impl FnOnce(&Path) {
    move |path| {
        let mut bytes = fs::read(path).unwrap();
        edit(&mut bytes);
        fs::write(path, bytes).unwrap();
    }
}

#[test]
fn a_flipped_bit_anywhere() {
    for file in &FILES[1..] {
        // The header's length, its first and some later byte, and the values.
        for place in [0, 7, 8, 60] {
            falls_back(file, "checksum", edit(|bytes| bytes[place] ^= 1));
        }
        falls_back(file, "checksum", edit(|bytes| *bytes.last_mut().unwrap() ^= 0x80));
    }
    falls_back(FILES[0], "manifest.json is damaged", edit(|bytes| bytes[20] ^= 1));
}

#[test]
fn a_file_that_is_short_long_or_gone() {
    for file in &FILES[1..] {
        falls_back(file, "bytes, ", edit(|bytes| bytes.truncate(bytes.len() - 1)));
        falls_back(file, "it has 0 bytes", edit(Vec::clear));
        falls_back(file, "bytes, ", edit(|bytes| bytes.push(0)));
        falls_back(file, &format!("{file} cannot be read: No such file"), |path| {
            fs::remove_file(path).unwrap()
        });
    }
    falls_back(FILES[0], "not JSON", edit(|bytes| bytes.truncate(bytes.len() / 2)));
    falls_back(FILES[0], "not JSON", edit(Vec::clear));
    falls_back(FILES[0], "cannot be read: No such file", |path| fs::remove_file(path).unwrap());
    falls_back(FILES[0], "No such file", |path| fs::remove_dir_all(path.parent().unwrap()).unwrap());
}

#[test]
fn a_manifest_with_other_contents() {
    let replace = |from: &'static str, to: &'static str| {
        edit(move |bytes| {
            let text = String::from_utf8(bytes.clone()).unwrap();
            assert!(text.contains(from), "{text}");
            *bytes = text.replacen(from, to, 1).into_bytes();
        })
    };
    falls_back(FILES[0], "its checksum is", replace("\"format_version\": 2", "\"format_version\": 1"));
    falls_back(FILES[0], "its checksum is", replace("\"step\": 2", "\"step\": 3"));
    falls_back(FILES[0], "its checksum is", replace("{\n  \"checksum\"", "{\"checksum\""));
}

#[test]
fn if_none_is_whole_all_reasons_are_listed_and_nothing_starts_from_scratch() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2] {
        save(dir.path(), step).unwrap();
        fs::remove_file(dir.path().join(format!("step-{step:08}/model.safetensors"))).unwrap();
    }
    let before = listing(dir.path());
    load(dir.path()).unwrap_err();
    assert_eq!(listing(dir.path()), before, "nothing is renamed, or the next start would be a new run");
    let error = load(dir.path()).unwrap_err();
    let CheckpointError::NoneUsable { refused, .. } = &error else { panic!("{error}") };
    assert!(
        refused[0].path.ends_with("step-00000002") && refused[1].path.ends_with("step-00000001"),
        "{error}"
    );
    let message = error.to_string();
    assert!(
        message.ends_with("nothing was changed; try another folder, or an empty one for a new run"),
        "{message}"
    );
}

#[test]
fn what_was_found_damaged_before_is_no_new_run() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    save(dir.path(), 2).unwrap();
    fs::write(dir.path().join("step-00000002/model.safetensors"), "").unwrap();
    load(dir.path()).unwrap();
    assert_eq!(listing(dir.path()), ["bad-step-00000002", "latest", "step-00000001"]);
    fs::remove_dir_all(dir.path().join("step-00000001")).unwrap();
    fs::remove_file(dir.path().join("latest")).unwrap();
    let error = load(dir.path()).unwrap_err().to_string();
    assert!(error.contains("bad-step-00000002 cannot be used: it was found damaged before"), "{error}");
    assert!(!Checkpoints::new(dir.path()).is_empty().unwrap());
    // The control: an empty folder is a new run.
    fs::remove_dir_all(dir.path().join("bad-step-00000002")).unwrap();
    assert!(load(dir.path()).unwrap().is_none() && Checkpoints::new(dir.path()).is_empty().unwrap());
}

#[test]
fn who_only_reads_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    save(dir.path(), 2).unwrap();
    fs::write(dir.path().join("step-00000002/model.safetensors"), "").unwrap();
    let before = listing(dir.path());
    alone(|group| {
        let owner = Checkpoints::new(dir.path());
        let reader = owner.clone().read_only();
        let loaded = reader.load_latest(group).unwrap().unwrap();
        assert_eq!((whole_step(&loaded), loaded.refused.len()), (1, 1));
        let message = reader.save(&state_of(3, 10), Mark::Latest, group).unwrap_err().to_string();
        assert!(
            message.ends_with("are only read here, not saved; try Checkpoints::new without read_only()"),
            "{message}"
        );
        assert_eq!(listing(dir.path()), before);
        // Its owner knows what it has found, and the whole one is not pushed out.
        owner.save(&state_of(3, 10), Mark::Latest, group).unwrap();
        assert_eq!(listing(dir.path()), ["bad-step-00000002", "latest", "step-00000001", "step-00000003"]);
    });
}

#[test]
fn a_reader_beside_a_run_that_saves_and_deletes() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let run = scope.spawn(|| {
            let owner = Checkpoints::new(dir.path()).keep_last(NonZeroUsize::MIN);
            let mut step = 1;
            while !is_over.load(Ordering::SeqCst) {
                step += 1;
                alone(|group| owner.save(&state_of(step, 10), Mark::Latest, group).map(drop)).unwrap();
            }
            step
        });
        let mut last = 0;
        for _ in 0..200 {
            let reader = Checkpoints::new(dir.path()).read_only();
            let loaded = alone(|group| reader.load_latest(group)).unwrap().unwrap();
            assert!(loaded.refused.is_empty(), "{:?}", loaded.refused);
            let step = whole_step(&loaded);
            assert!(step >= last, "{step} after {last}");
            last = step;
        }
        is_over.store(true, Ordering::SeqCst);
        assert!(run.join().unwrap() > 2, "control: nothing was saved meanwhile");
    });
    assert!(listing(dir.path()).iter().all(|name| !name.starts_with("bad-")));
}

#[test]
fn warnings_go_to_the_log_too() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    save(dir.path(), 2).unwrap();
    fs::write(dir.path().join("step-00000002/model.safetensors"), "").unwrap();
    let log = Arc::new(Mutex::new(Vec::new()));
    alone(|group| {
        let log = Arc::clone(&log);
        let logged = move |line: &str| log.lock().unwrap().push(line.to_owned());
        Checkpoints::new(dir.path()).on_warning(logged).load_latest(group).unwrap();
    });
    let log = log.lock().unwrap();
    let [refused, renamed] = &log[..] else { panic!("{log:?}") };
    assert!(
        refused.starts_with("warning: ") && refused.contains("model.safetensors is damaged: it has 0 bytes")
    );
    assert!(renamed.contains("was renamed to") && renamed.ends_with("bad-step-00000002"), "{renamed}");
}

#[test]
fn without_its_link_the_newest_is_the_latest() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 9).unwrap();
    save(dir.path(), 10).unwrap();
    fs::remove_file(dir.path().join("latest")).unwrap();
    fs::create_dir(dir.path().join(".tmp-step-00000011")).unwrap();
    assert_eq!(whole_step(&load(dir.path()).unwrap().unwrap()), 10);
    save(dir.path(), 11).unwrap();
    assert_eq!(listing(dir.path()), ["latest", "step-00000010", "step-00000011"]);
}

#[test]
fn a_best_that_is_damaged_has_no_stand_in() {
    let dir = tempfile::tempdir().unwrap();
    let error = alone(|group| {
        let checkpoints = Checkpoints::new(dir.path());
        checkpoints.save(&state_of(1, 10), Mark::Best, group).unwrap();
        checkpoints.save(&state_of(2, 10), Mark::Latest, group).unwrap();
        fs::write(dir.path().join("best/rng.safetensors"), "").unwrap();
        checkpoints.load_best(group).unwrap_err().to_string()
    });
    assert!(error.contains("step-00000001 cannot be used: rng.safetensors is damaged"), "{error}");
}

#[test]
fn the_one_that_was_used_instead_is_kept() {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    save(dir.path(), 2).unwrap();
    fs::write(dir.path().join("step-00000002/model.safetensors"), "").unwrap();
    alone(|group| {
        let checkpoints = Checkpoints::new(dir.path());
        assert_eq!(whole_step(&checkpoints.load_latest(group).unwrap().unwrap()), 1);
        checkpoints.save(&state_of(2, 10), Mark::Latest, group).unwrap();
        let bad = "bad-step-00000002";
        assert_eq!(listing(dir.path()), [bad, "latest", "step-00000001", "step-00000002"]);
        checkpoints.save(&state_of(3, 10), Mark::Latest, group).unwrap();
        assert_eq!(listing(dir.path()), [bad, "latest", "step-00000002", "step-00000003"]);
        // The second to be damaged at a step has a name of its own.
        fs::write(dir.path().join("step-00000002/model.safetensors"), "").unwrap();
        fs::remove_file(dir.path().join("latest")).unwrap();
        std::os::unix::fs::symlink("step-00000002", dir.path().join("latest")).unwrap();
        assert_eq!(whole_step(&checkpoints.load_latest(group).unwrap().unwrap()), 3);
        assert_eq!(listing(dir.path()), [bad, "bad-step-00000002.2", "latest", "step-00000003"]);
    });
}
