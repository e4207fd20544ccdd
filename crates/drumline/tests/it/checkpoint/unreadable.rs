//! A checkpoint that cannot be read is not damaged: no older one takes its place, and nothing is renamed or deleted.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

use drumline::checkpoint::{CheckpointError, Checkpoints, Loaded, Mark};
use rank_test::ranks_test;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

use super::{alone, listing, load, save, state_of, whole_step};

/// Loading must fail with these words, and change nothing.
fn assert_stops(dir: &Path, words: &[&str], load: impl Fn(&Path) -> Result<Option<Loaded>, CheckpointError>) {
    let before = listing(dir);
    let error = load(dir).unwrap_err();
    let message = error.to_string();
    assert!(matches!(error, CheckpointError::Unreadable { .. }), "{message}");
    for words in
        words.iter().chain(&["cannot load the checkpoint ", "step-00000002: ", "; nothing was changed; try "])
    {
        assert!(message.contains(words), "expected `{words}`: {message}");
    }
    assert!(!message.contains("damaged"), "{message}");
    assert_eq!(listing(dir), before);
}

fn two() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    save(dir.path(), 1).unwrap();
    save(dir.path(), 2).unwrap();
    dir
}

/// Loads without root's right to read whatever it wants.
fn load_as_anybody(dir: &Path) -> Result<Option<Loaded>, CheckpointError> {
    alone(|group| {
        let before = capabilities(None).unwrap();
        let mut less = before;
        less.effective.remove(CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH);
        set_capabilities(None, less).unwrap();
        let loaded = Checkpoints::new(dir).load_latest(group);
        set_capabilities(None, before).unwrap();
        loaded
    })
}

#[test]
fn a_file_or_folder_without_the_right_to_read_it() {
    for name in ["step-00000002", "step-00000002/model.safetensors", "step-00000002/manifest.json"] {
        let dir = two();
        let path = dir.path().join(name);
        let mode = fs::metadata(&path).unwrap().permissions();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        assert_stops(
            dir.path(),
            &["Permission denied", "try the user who saved it, or `chmod"],
            load_as_anybody,
        );
        fs::set_permissions(&path, mode).unwrap();
        // The control: it was whole all the time.
        assert_eq!(whole_step(&load_as_anybody(dir.path()).unwrap().unwrap()), 2);
    }
}

#[test]
fn a_best_that_cannot_be_read_is_not_replaced() {
    let dir = tempfile::tempdir().unwrap();
    alone(|group| {
        let checkpoints = Checkpoints::new(dir.path());
        checkpoints.save(&state_of(2, 10), Mark::Best, group).unwrap();
        checkpoints.save(&state_of(3, 10), Mark::Latest, group).unwrap();
    });
    let file = dir.path().join("step-00000002/rng.safetensors");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o000)).unwrap();
    assert_stops(dir.path(), &["rng.safetensors cannot be read: Permission denied"], load_as_anybody);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(whole_step(&load_as_anybody(dir.path()).unwrap().unwrap()), 3);
}

#[test]
fn an_error_of_the_system_that_says_nothing_of_the_bytes() {
    // Too many links is the one such error that any file system gives.
    let dir = two();
    let file = dir.path().join("step-00000002/model.safetensors");
    let aside = dir.path().join("aside");
    fs::rename(&file, &aside).unwrap();
    symlink("model.safetensors", &file).unwrap();
    assert_stops(dir.path(), &["model.safetensors cannot be read: ", "try again"], load);
    fs::rename(&aside, &file).unwrap();
    assert_eq!(whole_step(&load(dir.path()).unwrap().unwrap()), 2, "control");
}

#[test]
fn a_checkpoint_of_a_newer_program() {
    let dir = two();
    let file = dir.path().join("step-00000002/manifest.json");
    let text = fs::read_to_string(&file).unwrap();
    let newer = text.replace("\"format_version\": 2", "\"format_version\": 3");
    let (head, rest) = newer.split_at(newer.find(": \"").unwrap() + 3);
    let plain = format!("{head}00000000{}", &rest[8..]);
    let newer = format!("{head}{:08x}{}", crc32fast::hash(plain.as_bytes()), &rest[8..]);
    fs::write(&file, newer).unwrap();
    let message = [
        "it has format version 3, this program reads versions 1 and 2",
        "try the version of Drumline that saved it",
    ];
    assert_stops(dir.path(), &message, load);
    fs::write(&file, text).unwrap();
    assert_eq!(whole_step(&load(dir.path()).unwrap().unwrap()), 2, "control");
}

/// Bytes of this process's memory, as `ulimit -v` counts them.
fn virtual_memory() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse::<u64>().unwrap() * rustix::param::page_size() as u64
}

// In a process of its own, as the limit is the process's.
ranks_test!(too_little_memory, 1, {
    const VALUES: i64 = 60_000_000;
    let dir = tempfile::tempdir()?;
    save(dir.path(), 1)?;
    alone(|group| Checkpoints::new(dir.path()).save(&state_of(2, VALUES), Mark::Latest, group).map(drop))?;
    let before = getrlimit(Resource::As);
    let load_with_little = |dir: &Path| {
        setrlimit(Resource::As, Rlimit { current: Some(virtual_memory() + (128 << 20)), ..before }).unwrap();
        let loaded = load(dir);
        setrlimit(Resource::As, before).unwrap();
        loaded
    };
    assert_stops(dir.path(), &["cannot be loaded: ", "try with more memory (`ulimit -v`"], load_with_little);
    assert_eq!(whole_step(&load(dir.path())?.unwrap()), 2, "control");
});
