//! One training over two hosts, as its files and processes show it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rank_test::leftovers::Watch;
use rank_test::netns::Hosts;

use super::launcher::PORT;
use super::{Launcher, Recipe};

/// Time between looks at a training.
const LOOK: Duration = Duration::from_millis(50);
const RANK_NAME: &str = "drumline-train";
/// What is the launchers' in a run's folder, besides what the ranks write.
const OWN_FILES: [&str; 2] = ["node0.log", "node1.log"];

/// How a training is started.
pub(crate) struct Start {
    /// Of its folder.
    pub(crate) name: String,
    pub(crate) launcher: Launcher,
    /// The launcher's, besides those that it needs.
    pub(crate) flags: Vec<String>,
}

/// A training that runs, or has ended. Killed when dropped.
pub(crate) struct TrainingRun<'a> {
    recipe: &'a Recipe,
    hosts: &'a Hosts,
    start: Start,
    nodes: Vec<Child>,
    out: PathBuf,
    watch: Watch,
    /// Every rank's process that was ever seen.
    seen: BTreeSet<i32>,
    last_step: usize,
    steps_lost: usize,
}

impl<'a> TrainingRun<'a> {
    pub(crate) fn start(recipe: &'a Recipe, hosts: &'a Hosts, start: Start) -> Result<Self> {
        let out = recipe.run_folder(&start.name);
        let mut folders = DirBuilder::new();
        folders.recursive(true).mode(0o700);
        ["tmp", "runtime"].iter().try_for_each(|name| folders.create(out.join(name)))?;
        let (nodes, watch, seen) = (Vec::new(), Watch::new(), BTreeSet::new());
        let mut run = Self { recipe, hosts, start, nodes, out, watch, seen, last_step: 0, steps_lost: 0 };
        for host in 0..2 {
            let node = run.node(host)?;
            run.nodes.push(node);
        }
        Ok(run)
    }

    fn node(&self, host: usize) -> Result<Child> {
        let Self { recipe, hosts, out, .. } = self;
        let (first, nproc) = (hosts.address(0).to_string(), recipe.size.ranks_per_host.to_string());
        let launcher = self.start.launcher.flags(host, &first);
        let program = if launcher.is_some() { &recipe.programs.drumline } else { &recipe.programs.train };
        let mut command = hosts.command(host, &program.display().to_string());
        if let Some(words) = launcher {
            command.arg("run").args(words).args(["--nproc-per-node", &nproc]).args(&self.start.flags);
            command.arg("--").arg(&recipe.programs.train);
        }
        let log = File::options().append(true).create(true).open(self.log(host))?;
        command.args(recipe.args(out)).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let rank = host.to_string();
        let places =
            [("RANK", rank.as_str()), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")];
        command.envs(places).env("MASTER_ADDR", &first).env("MASTER_PORT", PORT);
        command.env("OMP_NUM_THREADS", "1").env("DRUMLINE_JOB_KEY_FILE", recipe.key());
        let (mark, value) = self.watch.mark();
        command.env(mark, value).env("TMPDIR", out.join("tmp")).env("XDG_RUNTIME_DIR", out.join("runtime"));
        command.spawn().context("cannot start a node")
    }

    /// Kills what was started on a host with SIGKILL: an agent, or a rank without one.
    pub(crate) fn kill_node(&mut self, host: usize) {
        // An error: it has ended.
        let _ = self.nodes[host].kill();
        let _ = self.nodes[host].wait();
    }

    /// Starts on a host again what was killed there.
    pub(crate) fn start_node(&mut self, host: usize) -> Result<()> {
        self.nodes[host] = self.node(host)?;
        Ok(())
    }

    pub(crate) fn out(&self) -> &Path {
        &self.out
    }

    fn log(&self, host: usize) -> PathBuf {
        self.out.join(OWN_FILES[host])
    }

    /// What a host's launcher and ranks have printed.
    pub(crate) fn printed(&self, host: usize) -> String {
        fs::read_to_string(self.log(host)).unwrap_or_default()
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.nodes.iter_mut().all(|node| !matches!(node.try_wait(), Ok(None)))
    }

    /// Whether this step was reached; not if the first node ends before, or takes longer than `patience` for a step.
    pub(crate) fn wait_for_step(&mut self, step: usize, patience: Duration) -> bool {
        let mut until = Instant::now() + patience;
        while self.last_step < step {
            let before = self.last_step;
            self.look();
            let is_over = !matches!(self.nodes[0].try_wait(), Ok(None));
            if self.last_step < step && (is_over || Instant::now() >= until) {
                return false;
            }
            if self.last_step != before {
                until = Instant::now() + patience;
            }
            std::thread::sleep(LOOK);
        }
        true
    }

    fn look(&mut self) {
        let step = self.steps().len();
        self.steps_lost += self.last_step.saturating_sub(step);
        self.last_step = step;
        let pids = (0..2).flat_map(|host| self.hosts.pids(host)).map(|pid| pid.as_raw_nonzero().get());
        let is_rank = |pid: &i32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let program = line.split(|byte| *byte == 0).next().unwrap_or_default();
            String::from_utf8_lossy(program).ends_with(RANK_NAME)
        };
        self.seen.extend(pids.filter(is_rank));
    }

    /// What was wrong with the nodes' ends, nothing if both exit with 0; one that does not end within `patience` is killed.
    pub(crate) fn end(&mut self, patience: Duration) -> Vec<String> {
        let ends = self.ends(patience);
        ends.iter().filter(|end| end.how != How::Succeeded).map(ToString::to_string).collect()
    }

    /// How the nodes ended; one that does not end within `patience` is killed.
    pub(crate) fn ends(&mut self, patience: Duration) -> Vec<NodeEnd> {
        let until = Instant::now() + patience;
        while !self.has_ended() && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        let logs = [0, 1].map(|host| self.printed(host));
        let end = |(host, node): (usize, &mut Child)| {
            let how = match node.try_wait() {
                Ok(Some(status)) if status.success() => How::Succeeded,
                Ok(Some(status)) => How::Failed(status.to_string()),
                _ => How::StillRunning,
            };
            NodeEnd { host, how, log: logs[host].clone() }
        };
        let ends = self.nodes.iter_mut().enumerate().map(end).collect();
        (0..self.nodes.len()).for_each(|host| self.kill_node(host));
        ends
    }

    /// Loss, gradient norm and samples of each step, as they were written.
    pub(crate) fn steps(&self) -> Vec<String> {
        steps_in(&self.out.join("metrics.jsonl"))
    }

    /// The same of ranks that started over: those before them had come to no checkpoint, and their file was kept.
    pub(crate) fn steps_before(&self) -> Vec<String> {
        let files = (1..).map(|number| self.out.join(earlier_metrics(number)));
        files.take_while(|file| file.exists()).flat_map(|file| steps_in(&file)).collect()
    }

    pub(crate) fn restarts(&self) -> usize {
        self.printed(0).matches(" begins").count()
    }

    /// How many ranks were started besides the first two.
    pub(crate) fn processes(&self) -> usize {
        self.seen.len().saturating_sub(2)
    }

    pub(crate) fn steps_lost(&self) -> usize {
        self.steps_lost
    }

    /// The weights and the optimizer's state after the last step, as they lie on disk.
    pub(crate) fn weights(&self) -> Option<Vec<u8>> {
        let read = |name| fs::read(self.out.join("checkpoints/latest").join(name)).ok();
        Some([read("model.safetensors")?, read("optimizer.safetensors")?].concat())
    }

    /// The files that the run has left, but for its launchers' logs and those of `steps_before`.
    pub(crate) fn files(&self) -> BTreeSet<String> {
        let mut files = BTreeSet::new();
        list(&self.out, &self.out, &mut files);
        let earlier = (1..).map(earlier_metrics).take_while(|name| self.out.join(name).exists());
        let expected: BTreeSet<_> = OWN_FILES.map(str::to_owned).into_iter().chain(earlier).collect();
        &files - &expected
    }

    /// Processes of the run, listening sockets on its hosts, and shared memory, if they are there after `within`.
    pub(crate) fn left_behind(&self, within: Duration) -> Vec<String> {
        let until = Instant::now() + within;
        loop {
            let mut left: Vec<_> = self.watch.now().iter().map(ToString::to_string).collect();
            for host in 0..2 {
                let pids = self.hosts.pids(host).into_iter();
                left.extend(pids.map(|pid| format!("process {} on host{host}", pid.as_raw_nonzero())));
                left.extend(self.hosts.listening(host).into_iter().map(|port| format!("host{host}: {port}")));
            }
            if left.is_empty() || Instant::now() >= until {
                return left;
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// How what was started on a host ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct NodeEnd {
    pub(crate) host: usize,
    pub(crate) how: How,
    /// What it printed.
    pub(crate) log: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum How {
    Succeeded,
    Failed(String),
    StillRunning,
}

impl fmt::Display for NodeEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, how, log } = self;
        match how {
            How::Succeeded => write!(f, "host{host}: exit 0"),
            How::Failed(status) => write!(f, "host{host}: {status}: {}", last_line(log)),
            How::StillRunning => write!(f, "host{host} was still running"),
        }
    }
}

impl Drop for TrainingRun<'_> {
    fn drop(&mut self) {
        (0..self.nodes.len()).for_each(|host| self.kill_node(host));
    }
}

/// Where a run that starts from scratch keeps the events of the one before.
fn earlier_metrics(number: usize) -> String {
    format!("metrics.{number}.jsonl")
}

fn steps_in(file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let figures = |line: &str| {
        let event: serde_json::Value = serde_json::from_str(line).ok()?;
        let figures = ["step", "loss", "grad_norm", "samples"].map(|key| event[key].to_string());
        (event["kind"] == "step").then(|| figures.join(" "))
    };
    text.lines().filter_map(figures).collect()
}

fn last_line(log: &str) -> String {
    let line = log.lines().rev().find(|line| !line.trim().is_empty());
    line.unwrap_or("nothing said").chars().take(200).collect()
}

/// The names of all files below a folder. Links are files.
fn list(folder: &Path, base: &Path, names: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            list(&path, base, names);
        } else {
            names.insert(path.strip_prefix(base).unwrap_or(&path).display().to_string());
        }
    }
}
