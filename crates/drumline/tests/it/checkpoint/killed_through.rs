//! SIGKILL at each call of the system that changes the folder, in a save through the trainer and through the
//! `Accelerator`, with damage before and after: the run resumes, and ends with the weights of one that nobody
//! disturbed.
//!
//! ```text
//!   base: steps 1, 2 ─┬─────────────▶ copy ─ under strace: resume, step, save ✗ at the nth rename, fsync, … ─▶ verdict
//!                     └ 2 damaged ──▶ copy ─ the same, while damaged ones are renamed ✗ ────────────────────▶ verdict
//!   verdict: nothing incomplete is loaded; after step 4 the weights are right, also if the newest was damaged as well
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use drumline::checkpoint::Checkpoints;
use drumline::data::{DistributedSampler, Loader, LoaderOptions, SamplerOptions};
use drumline::trainer::{CrossEntropy, DistTrainer, LoadBestModel};
use drumline::{Accelerator, ProcessGroup};
use rank_test::require_tool;
use tch::nn::VarStore;
use tch::{Device, Tensor};

use super::super::trainer::{Net, data, difference, sgd, weights};
use super::{alone, listing};

/// For the rank: the folder, and how many epochs of one step each to train.
const RANK: &str = "DRUMLINE_TEST_KILLED_RANK";
const SAMPLES: usize = 4;
/// Steps of a whole training.
const WHOLE: u64 = 4;
/// Ranks that run at a time.
const AT_ONCE: usize = 2;

type Train = fn(&ProcessGroup, &Path, u64) -> anyhow::Result<Vec<Tensor>>;

/// Resumes, and trains until so many epochs are done, with a save after each.
fn through_trainer(group: &ProcessGroup, dir: &Path, epochs: u64) -> anyhow::Result<Vec<Tensor>> {
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let trainer = DistTrainer::new(group, &net, &store, data(SAMPLES)).dev_data(data(SAMPLES));
    let trainer = trainer.loss(CrossEntropy::default()).optimizer(sgd(&store)?).print_every(0);
    let trainer = trainer.batch_size_per_gpu(SAMPLES).num_workers(0).n_epochs(epochs);
    trainer.save_path(dir).resume_from(dir).train(LoadBestModel::No)?;
    Ok(weights(&store))
}

/// The same as a loop of one's own.
fn through_accelerator(group: &ProcessGroup, dir: &Path, epochs: u64) -> anyhow::Result<Vec<Tensor>> {
    let accelerator = Accelerator::builder().group(group).cpu().build()?;
    let store = VarStore::new(Device::Cpu);
    let net = Net::new(&store);
    let sampler = DistributedSampler::new(SamplerOptions { num_samples: SAMPLES, ..Default::default() })?;
    let options = LoaderOptions { batch_size: SAMPLES, workers: 0, ..Default::default() };
    let loader = Loader::new(data(SAMPLES), sampler, options)?;
    let (model, mut optimizer, loader) = accelerator.prepare(net, &store, sgd(&store)?, loader)?;
    let done = accelerator.load_state(dir)?.map_or(0, |resumed| resumed.step);
    for epoch in done..epochs {
        for batch in loader.epoch(epoch) {
            let (x, y) = batch?;
            accelerator.backward(&model.forward_t(&x, true).cross_entropy_for_logits(&y))?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        accelerator.save_state(dir)?;
    }
    Ok(weights(&store))
}

fn trained(train: Train, dir: &Path, epochs: u64) -> anyhow::Result<Vec<Tensor>> {
    alone(|group| train(group, dir, epochs))
}

fn copied(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let copied = Command::new("cp").arg("-a").arg(from.join(".")).arg(dir.path()).status().unwrap();
    assert!(copied.success());
    dir
}

fn damage(checkpoint: &Path) {
    let file = checkpoint.join("model.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(file, bytes).unwrap();
}

/// Starts this test as a rank under strace.
fn start(test: &str, dir: &Path, epochs: u64, strace: &[String]) -> Child {
    let mut command = Command::new("strace");
    command.args(["-f", "-qq", "-y"]).args(strace).arg(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(RANK, format!("{epochs} {}", dir.display()));
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// A point of a save: the nth call of this name by the thread that saves.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Point {
    call: String,
    nth: usize,
}

/// The points of a run that nobody kills. Of several writes to a file the first stands for all: what is half written is
/// not looked at.
fn points(test: &str, base: &Path, epochs: u64) -> Vec<Point> {
    let (dir, trace) = (copied(base), tempfile::NamedTempFile::new().unwrap());
    let calls = r"trace=/^(mkdir|rename|symlink|unlink|rmdir)(at|at2)?$,write,fsync".to_owned();
    let strace = ["-o".to_owned(), trace.path().display().to_string(), "-e".to_owned(), calls];
    assert!(start(test, dir.path(), epochs, &strace).wait().unwrap().success());
    let (text, folder) = (fs::read_to_string(trace.path()).unwrap(), dir.path().display().to_string());
    let (mut counts, mut written, mut found) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
    for line in text.lines() {
        let Some((thread, rest)) = line.split_once(' ') else { continue };
        let Some((call, arguments)) = rest.trim().split_once('(') else { continue };
        let nth: &mut usize = counts.entry((thread.to_owned(), call.to_owned())).or_default();
        *nth += 1;
        let file = arguments.split(['<', '>', '"']).find(|word| word.contains(&folder));
        let Some(file) = file else { continue };
        if call != "write" || written.insert(file.to_owned()) {
            found.insert(Point { call: call.to_owned(), nth: *nth });
        }
    }
    found.into_iter().collect()
}

/// What killed ranks have left. strace ends as its rank does.
fn killed(test: &str, base: &Path, epochs: u64, points: &[Point]) -> Vec<tempfile::TempDir> {
    let start = |Point { call, nth }: &Point| {
        let (dir, inject) = (copied(base), format!("inject={call}:signal=KILL:when={nth}"));
        let strace = ["-o", "/dev/null", "-e", &format!("trace={call}"), "-e", &inject].map(str::to_owned);
        (start(test, dir.path(), epochs, &strace), dir)
    };
    let started: Vec<_> = points.iter().map(start).collect();
    let ended = started.into_iter().zip(points).map(|((mut rank, dir), point)| {
        assert_eq!(rank.wait().unwrap().signal(), Some(9), "{point:?} did not kill it");
        dir
    });
    ended.collect()
}

/// The newest that is whole, and how many are.
fn newest(dir: &Path) -> (PathBuf, usize) {
    let loaded = alone(|group| Checkpoints::new(dir).read_only().load_latest(group)).unwrap().unwrap();
    let is_refused = |name: &str| loaded.refused.iter().any(|refused| refused.path.ends_with(name));
    let whole = listing(dir).into_iter().filter(|name| name.starts_with("step-") && !is_refused(name));
    (loaded.path.clone(), whole.count())
}

/// Kills the rank at each point on its way from `base` to `epochs`, and looks at what it has left.
fn grid(test: &str, train: Train, base: &Path, (epochs, calls): (u64, &[&str])) -> usize {
    let undisturbed = trained(train, tempfile::tempdir().unwrap().path(), WHOLE).unwrap();
    let mut points = points(test, base, epochs);
    points.retain(|point| calls.is_empty() || calls.iter().any(|call| point.call.starts_with(call)));
    for some in points.chunks(AT_ONCE) {
        for (left, point) in killed(test, base, epochs, some).iter().zip(some) {
            let resumed = copied(left.path());
            let found = trained(train, resumed.path(), WHOLE);
            assert_eq!(
                difference(&found.unwrap(), &undisturbed),
                0.0,
                "{point:?}: {:?}",
                listing(left.path())
            );
            assert!(listing(resumed.path()).iter().all(|name| !name.starts_with(".tmp-")), "{point:?}");
            // And then the disk does its part.
            let (newest, whole) = newest(left.path());
            damage(&newest);
            let found = trained(train, left.path(), WHOLE);
            match whole {
                1 => assert!(found.unwrap_err().to_string().contains("no checkpoint in "), "{point:?}"),
                _ => assert_eq!(difference(&found.unwrap(), &undisturbed), 0.0, "{point:?} and damage"),
            }
        }
    }
    points.len()
}

fn killed_at_each_point(test: &str, train: Train) {
    if let Ok(words) = std::env::var(RANK) {
        let (epochs, dir) = words.split_once(' ').unwrap();
        trained(train, Path::new(dir), epochs.parse().unwrap()).unwrap();
        return;
    }
    if !require_tool("strace") {
        return;
    }
    let base = tempfile::tempdir().unwrap();
    trained(train, base.path(), 2).unwrap();
    let whole = grid(test, train, base.path(), (3, &[]));
    damage(&base.path().join("step-00000002"));
    let damaged = grid(test, train, base.path(), (2, &["rename", "symlink"]));
    println!("killed at {whole} points of a save, and at {damaged} with a damaged checkpoint");
    assert!(whole >= 18 && damaged >= 3, "{whole}, {damaged}");
    // The control: the verdict is no mere consequence of training from the beginning, which nobody may do here.
    damage(&base.path().join("step-00000001"));
    let message = trained(train, base.path(), WHOLE).unwrap_err().to_string();
    assert!(message.contains("no checkpoint in ") && message.contains("is damaged"), "{message}");
}

#[test]
fn through_the_trainer() {
    killed_at_each_point("it::checkpoint::killed_through::through_the_trainer", through_trainer);
}

#[test]
fn through_the_accelerator() {
    killed_at_each_point("it::checkpoint::killed_through::through_the_accelerator", through_accelerator);
}
