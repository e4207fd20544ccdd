//! A disk that is full, or cannot be written to, at each point of a save: an error that says so, and nothing is lost.
//!
//! The disk is a small tmpfs in a mount namespace of its own, in which this test binary is run again.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use drumline::ProcessGroup;
use drumline::checkpoint::{CheckpointError, Checkpoints, Mark, RunState, StateLayout};
use drumline::comm::{Axis, LocalGroup, MeshShape};
use drumline::engine::{Offload, Place, Placed, ShardOptions, Stage};
use drumline::optim::{AdamOptions, AdamW, Named, parameters};
use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel};
use rank_test::skipped;
use rustix::fs::statvfs;
use tch::nn::VarStore;
use tch::{Device, Kind, Tensor};

use super::super::trainer::{Net, data};
use super::{alone, listing, load, save, state_of, whole_step};

const DISK: &str = "DRUMLINE_TEST_SMALL_DISK";

/// Runs the test `name` again on a small disk.
fn on_small_disk(name: &str) -> Option<Output> {
    let dir = tempfile::tempdir().unwrap();
    let script = r#"mount -t tmpfs -o size=512k,nr_inodes=64 none "$1" && cd / && shift && exec "$@""#;
    let run = |flags: &[&str], command: &[&str]| {
        let mut unshare = Command::new("timeout");
        unshare.args(["-k", "5", "120", "unshare"]).args(flags).args(["sh", "-c", script, "sh"]);
        unshare.arg(dir.path()).args(command).env(DISK, dir.path());
        unshare.output().unwrap()
    };
    // The first for root, the second for those whom the kernel lets be root in a namespace.
    let ways: [&[&str]; 2] = [&["-m"], &["-r", "-m"]];
    let Some(way) = ways.into_iter().find(|way| run(way, &["true"]).status.success()) else {
        skipped("no small disk can be mounted here, neither as root nor in a user namespace");
        return None;
    };
    let program = std::env::current_exe().unwrap();
    Some(run(way, &[program.to_str().unwrap(), "--exact", name, "--nocapture", "--test-threads=1"]))
}

/// In the test's own process runs it on a small disk, there `body`.
fn small_disk_test(name: &str, body: impl FnOnce(&Path)) {
    if let Some(dir) = std::env::var_os(DISK) {
        return body(&PathBuf::from(dir));
    }
    if let Some(output) = on_small_disk(name) {
        let printed = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        assert!(output.status.success(), "{}{}", printed(&output.stdout), printed(&output.stderr));
        assert!(printed(&output.stdout).contains("1 passed"), "{}", printed(&output.stdout));
    }
}

/// Takes all but so many blocks of the disk.
fn leave_blocks(dir: &Path, blocks: u64) {
    let stat = statvfs(dir).unwrap();
    let taken = (stat.f_bfree - blocks) * stat.f_bsize;
    fs::write(dir.join("filler"), vec![0; taken as usize]).unwrap();
    assert_eq!(statvfs(dir).unwrap().f_bfree, blocks);
}

/// Takes all but so many inodes.
fn leave_inodes(dir: &Path, inodes: u64) {
    fs::create_dir(dir.join("fillers")).unwrap();
    for number in inodes..statvfs(dir).unwrap().f_ffree {
        fs::write(dir.join(format!("fillers/{number}")), "").unwrap();
    }
    assert_eq!(statvfs(dir).unwrap().f_ffree, inodes);
}

/// Saves step 2 on the full disk. On failure step 1 must be complete, and nothing left behind. Returns where it failed.
fn try_save(dir: &Path) -> Option<String> {
    let before = listing(dir);
    let error = save(dir, 2).err()?;
    let CheckpointError::Write { path, .. } = &error else { panic!("{error}") };
    assert!(
        error.to_string().contains("No space left on device (os error 28); try freeing space"),
        "{error}"
    );
    assert_eq!(whole_step(&load(dir).unwrap().unwrap()), 1);
    assert_eq!(listing(dir), before);
    Some(path.file_name().unwrap().to_str().unwrap().to_owned())
}

/// All places at which saves failed as more and more was left of the disk, until one did not.
fn failures(dir: &Path, leave: impl Fn(&Path, u64)) -> BTreeSet<String> {
    let mut failed = BTreeSet::new();
    for left in 0..60 {
        let disk = dir.join(left.to_string());
        save(&disk, 1).unwrap();
        leave(dir, left);
        let failure = try_save(&disk);
        let _ = (fs::remove_file(dir.join("filler")), fs::remove_dir_all(dir.join("fillers")));
        let Some(failure) = failure else { return failed };
        failed.insert(failure);
        save(&disk, 2).unwrap();
        assert_eq!(whole_step(&load(&disk).unwrap().unwrap()), 2, "with space again, the job continues");
        fs::remove_dir_all(disk).unwrap();
    }
    panic!("no save was possible, however much room there was: {failed:?}");
}

#[test]
fn no_room_for_bytes_at_each_point() {
    small_disk_test("it::checkpoint::full_disk::no_room_for_bytes_at_each_point", |dir| {
        let expected = ["manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"];
        assert_eq!(failures(dir, leave_blocks), expected.map(String::from).into());
    });
}

#[test]
fn no_room_for_names_at_each_point() {
    small_disk_test("it::checkpoint::full_disk::no_room_for_names_at_each_point", |dir| {
        let expected = [
            ".tmp-step-00000002",
            "latest",
            "manifest.json",
            "model.safetensors",
            "optimizer.safetensors",
            "rng.safetensors",
        ];
        assert_eq!(failures(dir, leave_inodes), expected.map(String::from).into());
    });
}

/// The state of a rank: rank 0 holds one row of a tensor, rank 1 all others.
fn divided_state(rank: usize, step: u64) -> RunState {
    let whole = Tensor::full([200, 30], step as f64, (Kind::Float, Device::Cpu));
    let (from, num) = [(0, 1), (1, 199)][rank];
    let own = whole.narrow(0, from, num);
    let placed = Placed {
        name: "w".into(),
        tensor: own.shallow_clone(),
        whole: whole.size(),
        offsets: vec![from, 0],
        is_saved_here: true,
        boxes: Vec::new(),
    };
    let layout = StateLayout::new(&[placed.of_whole()], &[placed]).unwrap();
    let mut state = RunState::new(vec![Named { name: "w".into(), tensor: own }]).unwrap();
    state.layout = Some(layout);
    state.mesh = Some(MeshShape::default().with(Axis::Shard, 2));
    state.step = step;
    state
}

/// Both ranks save; returns their errors.
fn save_divided(dir: &Path, step: u64) -> Vec<Option<String>> {
    let saved = LocalGroup::run(2, |group| {
        let saved = Checkpoints::new(dir).save(&divided_state(group.rank(), step), Mark::Latest, &group);
        Ok(saved.err().map(|error| error.to_string()))
    });
    saved.unwrap()
}

#[test]
fn no_room_for_the_files_of_one_rank() {
    small_disk_test("it::checkpoint::full_disk::no_room_for_the_files_of_one_rank", |dir| {
        let step = |disk: &Path| load(disk).unwrap().unwrap().state.step;
        let mut is_of_rank_1 = false;
        for left in 0..60 {
            let disk = dir.join(left.to_string());
            assert_eq!(save_divided(&disk, 1), [None, None]);
            let before = listing(&disk);
            leave_blocks(dir, left);
            let errors = save_divided(&disk, 2);
            fs::remove_file(dir.join("filler")).unwrap();
            if errors == [None, None] {
                assert!(is_of_rank_1, "rank 1, which has more to write, has failed alone");
                return;
            }
            for error in &errors {
                let error = error.as_ref().expect("all ranks get the error");
                assert!(
                    error.contains("No space left on device (os error 28); try freeing space"),
                    "{error}"
                );
            }
            is_of_rank_1 |= errors[0].as_ref().is_some_and(|error| error.starts_with("on rank 1: "));
            assert_eq!(
                (listing(&disk), step(&disk)),
                (before, 1),
                "nothing is lost, and nothing is left behind"
            );
            assert_eq!(save_divided(&disk, 2), [None, None]);
            assert_eq!(step(&disk), 2, "with space again, the job continues");
            fs::remove_dir_all(disk).unwrap();
        }
        panic!("no save was possible, however much room there was");
    });
}

/// Trains up to this step, with the optimizer's state in a file beside the checkpoints.
fn train_offloaded(dir: &Path, steps: u64) -> anyhow::Result<()> {
    let (group, store) = (ProcessGroup::from_env()?, VarStore::new(Device::Cpu));
    let net = Net::with_large(&store);
    let offload = Offload { optimizer: Place::Disk(dir.to_owned()), ..Offload::default() };
    let engine = ShardOptions { offload, ..ShardOptions::new(Stage::Zero1) };
    let adam = AdamW::new(parameters(&store), AdamOptions::default())?;
    let trainer = DistTrainer::new(&group, &net, &store, data(16)).loss(CrossEntropy::default());
    let trainer = trainer.optimizer(adam).engine(engine).print_every(0).batch_size_per_gpu(4).n_epochs(2);
    trainer.max_steps(steps).save_path(dir).resume_from(dir).train(LoadBestModel::No)?;
    Ok(())
}

#[test]
fn no_room_for_offloaded_state_leaves_the_last_checkpoint() {
    small_disk_test(
        "it::checkpoint::full_disk::no_room_for_offloaded_state_leaves_the_last_checkpoint",
        |dir| {
            let step = || load(dir).unwrap().unwrap().state.step;
            train_offloaded(dir, 3).unwrap();
            assert_eq!(step(), 3);
            let before = listing(dir);
            leave_blocks(dir, 4);
            let error = train_offloaded(dir, 6).unwrap_err().to_string();
            assert!(error.contains("rank 0 cannot offload: state needs "), "{error}");
            assert!(error.contains("where 16384 are free; try another folder"), "{error}");
            fs::remove_file(dir.join("filler")).unwrap();
            assert_eq!((listing(dir), step()), (before, 3), "nothing is lost, and nothing is left behind");
            train_offloaded(dir, 6).unwrap();
            assert_eq!(step(), 6, "with space again, the job continues");
        },
    );
}

#[test]
fn a_disk_that_turns_read_only() {
    small_disk_test("it::checkpoint::full_disk::a_disk_that_turns_read_only", |dir| {
        let remount = |how: &str| {
            let done =
                Command::new("mount").args(["-o", &format!("remount,{how}")]).arg(dir).status().unwrap();
            assert!(done.success());
        };
        save(dir, 1).unwrap();
        remount("ro");
        let error = save(dir, 2).unwrap_err().to_string();
        assert!(
            error.contains("Read-only file system (os error 30); try a folder that can be written to"),
            "{error}"
        );
        assert_eq!(whole_step(&load(dir).unwrap().unwrap()), 1);
        remount("rw");
        save(dir, 2).unwrap();
        assert_eq!(whole_step(&load(dir).unwrap().unwrap()), 2);
    });
}

#[test]
fn a_folder_that_cannot_be() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    fs::write(&file, "not a folder").unwrap();
    for path in [file.clone(), file.join("below")] {
        let error = save(&path, 1).unwrap_err().to_string();
        assert!(error.ends_with("; try a folder that is not a file"), "{error}");
        assert!(load(&path).unwrap_err().to_string().starts_with("cannot look for checkpoints in"));
    }
    // Without the right to write; root has it always.
    if !rustix::process::geteuid().is_root() {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o555)).unwrap();
        let error = save(&dir.path().join("new"), 1).unwrap_err().to_string();
        assert!(error.ends_with("; try a folder that can be written to"), "{error}");
    }
}

#[test]
fn a_link_that_cannot_be_moved_takes_the_new_one_back() {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir_all(dir.path().join("latest/full")).unwrap();
    let error = alone(|group| Checkpoints::new(dir.path()).save(&state_of(1, 10), Mark::Best, group));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("latest: "), "{error}");
    assert!(!listing(dir.path()).contains(&"step-00000001".to_owned()), "{:?}", listing(dir.path()));
}
