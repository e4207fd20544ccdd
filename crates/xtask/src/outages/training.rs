//! One training over two hosts, as its files and processes show it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rank_test::netns::Hosts;

use super::config;

/// Time between looks at a training.
const LOOK: Duration = Duration::from_millis(50);
const PORT: &str = "29500";
const RANK_NAME: &str = "drumline-train";

/// How the ranks are started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Way {
    /// Each rank by hand, without a launcher
    Plain,
    /// `drumline run --max-restarts 0`
    NoRestarts,
    /// `drumline run --max-restarts 3`
    Restarts,
    /// `drumline run --nnodes 1:2`
    Elastic,
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Plain => "no launcher",
            Way::NoRestarts => "--max-restarts 0",
            Way::Restarts => "--max-restarts 3",
            Way::Elastic => "--nnodes 1:2",
        }
    }

    /// What `drumline run` is given on a host; `None`: it has no part in it.
    fn launcher(self, host: usize, first: &str) -> Option<Vec<String>> {
        let fixed = |restarts: &str| {
            let host = host.to_string();
            let words =
                ["--nnodes", "2", "--node-rank", &host, "--master-addr", first, "--master-port", PORT];
            words.into_iter().chain(["--max-restarts", restarts]).map(str::to_owned).collect()
        };
        match self {
            Way::Plain => None,
            Way::NoRestarts => Some(fixed("0")),
            Way::Restarts => Some(fixed("3")),
            Way::Elastic => {
                let endpoint = format!("{first}:{PORT}");
                let words = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", &endpoint];
                Some(words.map(str::to_owned).to_vec())
            }
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = clap::ValueEnum::to_possible_value(self);
        f.write_str(value.as_ref().map_or("", |value| value.get_name()))
    }
}

/// What is run.
pub(super) struct Programs {
    pub(super) drumline: PathBuf,
    pub(super) train: PathBuf,
}

/// The same training, as often as wanted.
pub(super) struct Course<'a> {
    programs: &'a Programs,
    folder: PathBuf,
    pub(super) num_steps: usize,
}

impl<'a> Course<'a> {
    /// Makes data and a key.
    pub(super) fn prepare(programs: &'a Programs, folder: &Path, num_steps: usize) -> Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder).with_context(|| format!("cannot remove {}", folder.display()))?;
        }
        fs::create_dir_all(folder)?;
        let course = Self { programs, folder: folder.to_owned(), num_steps };
        let data = |words: &[&str]| {
            let output =
                Command::new(&programs.train).arg("data").args(words).current_dir(folder).output()?;
            ensure!(output.status.success(), "no data: {}", String::from_utf8_lossy(&output.stderr));
            Ok(())
        };
        data(&["synth-story", "--out", ".", "--train", "400", "--valid", "6"])?;
        data(&["tokens", "train.txt", "--out", "train.tokens"])?;
        data(&["tokens", "valid.txt", "--out", "valid.tokens"])?;
        let key = File::options().write(true).create_new(true).mode(0o600).open(course.key())?;
        std::io::Write::write_all(&mut &key, "5a".repeat(32).as_bytes())?;
        Ok(course)
    }

    fn key(&self) -> PathBuf {
        self.folder.join("key")
    }

    fn args(&self, out: &Path) -> Vec<String> {
        let path = |path: &Path| path.display().to_string();
        let (cfg, out) = (path(&config("gpt-tiny.yaml")), path(out));
        let [train, dev] = ["train.tokens", "valid.tokens"].map(|name| path(&self.folder.join(name)));
        let steps = self.num_steps.to_string();
        [
            ["train", "--cfg", &cfg, "OUT_DIR", &out, "GPT.TRAIN", &train, "GPT.DEV", &dev],
            [
                "TRAIN.MAX_STEPS",
                &steps,
                "TRAIN.SAVE_FREQ",
                "10",
                "OPTIM.MAX_EPOCH",
                "100",
                "TRAIN.TENSORBOARD",
                "false",
                "",
            ],
        ]
        .concat()
        .into_iter()
        .filter(|word| !word.is_empty())
        .map(str::to_owned)
        .collect()
    }
}

/// A training that runs, or has ended.
pub(super) struct Training<'a> {
    hosts: &'a Hosts,
    nodes: Vec<Child>,
    out: PathBuf,
    /// Every rank's process that was ever seen.
    seen: BTreeSet<i32>,
    last_step: usize,
    steps_lost: usize,
}

impl<'a> Training<'a> {
    pub(super) fn start(course: &Course<'_>, hosts: &'a Hosts, way: Way, flags: &[String]) -> Result<Self> {
        let out = course.folder.join(format!("run-{}", fs::read_dir(&course.folder)?.count()));
        fs::create_dir_all(&out)?;
        let first = hosts.address(0).to_string();
        let mut nodes = Vec::new();
        for host in 0..2 {
            let words = way.launcher(host, &first);
            let program = if words.is_some() { &course.programs.drumline } else { &course.programs.train };
            let mut command = hosts.command(host, &program.display().to_string());
            if let Some(words) = words {
                command.arg("run").args(words).args(flags).arg("--").arg(&course.programs.train);
            }
            let log = File::create(out.join(format!("node{host}.log")))?;
            command.args(course.args(&out)).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
            let rank = host.to_string();
            let places = [
                ("RANK", rank.as_str()),
                ("WORLD_SIZE", "2"),
                ("LOCAL_RANK", "0"),
                ("LOCAL_WORLD_SIZE", "1"),
            ];
            command.envs(places).env("MASTER_ADDR", &first).env("MASTER_PORT", PORT);
            command.env("OMP_NUM_THREADS", "1").env("DRUMLINE_JOB_KEY_FILE", course.key());
            nodes.push(command.spawn().context("cannot start a node")?);
        }
        Ok(Self { hosts, nodes, out, seen: BTreeSet::new(), last_step: 0, steps_lost: 0 })
    }

    pub(super) fn out(&self) -> &Path {
        &self.out
    }

    /// Whether this step was reached; not if the first node ends before, or takes longer than `patience` for a step.
    pub(super) fn wait_for_step(&mut self, step: usize, patience: Duration) -> bool {
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

    /// How both nodes ended; one that does not within `patience` is killed.
    pub(super) fn end(&mut self, patience: Duration) -> String {
        let until = Instant::now() + patience;
        while self.nodes.iter_mut().any(|node| matches!(node.try_wait(), Ok(None))) && Instant::now() < until
        {
            std::thread::sleep(LOOK);
        }
        let word = |(host, node): (usize, &mut Child)| match node.try_wait() {
            Ok(Some(status)) if status.success() => String::new(),
            Ok(Some(status)) => {
                format!("host{host}: {status}: {}", last_line(&self.out.join(format!("node{host}.log"))))
            }
            _ => format!("host{host} was still running"),
        };
        let words: Vec<_> =
            self.nodes.iter_mut().enumerate().map(word).filter(|word| !word.is_empty()).collect();
        self.kill();
        if words.is_empty() { "both exit 0".to_owned() } else { words.join("; ") }
    }

    fn kill(&mut self) {
        for node in &mut self.nodes {
            // An error: it has ended.
            let _ = node.kill();
            let _ = node.wait();
        }
    }

    /// Loss and gradient norm of each step, as they were written.
    pub(super) fn steps(&self) -> Vec<String> {
        let text = fs::read_to_string(self.out.join("metrics.jsonl")).unwrap_or_default();
        let figures = |line: &str| {
            let event: serde_json::Value = serde_json::from_str(line).ok()?;
            (event["kind"] == "step")
                .then(|| format!("{} {} {}", event["step"], event["loss"], event["grad_norm"]))
        };
        text.lines().filter_map(figures).collect()
    }

    pub(super) fn restarts(&self) -> usize {
        fs::read_to_string(self.out.join("node0.log")).unwrap_or_default().matches(" begins").count()
    }

    /// How many ranks were started besides the first two.
    pub(super) fn processes(&self) -> usize {
        self.seen.len().saturating_sub(2)
    }

    pub(super) fn steps_lost(&self) -> usize {
        self.steps_lost
    }
}

impl Drop for Training<'_> {
    fn drop(&mut self) {
        self.kill();
    }
}

fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines()
        .rev()
        .find(|line| !line.trim().is_empty())
        .unwrap_or("nothing said")
        .chars()
        .take(200)
        .collect()
}

/// How the figures of two runs compare.
pub(super) enum Losses {
    Equal,
    /// The first step at which they differ, or one of them ends.
    DifferFrom(usize),
}

impl Losses {
    pub(super) fn compare(steps: &[String], reference: &[String]) -> Self {
        let equal = steps.iter().zip(reference).take_while(|(one, other)| one == other).count();
        let is_whole = equal == reference.len() && equal == steps.len();
        if is_whole { Losses::Equal } else { Losses::DifferFrom(equal + 1) }
    }
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Losses::Equal => f.write_str("bit-equal"),
            Losses::DifferFrom(step) => write!(f, "differ from step {step}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_equal_only_if_they_are_whole() {
        let steps = |list: &[&str]| list.iter().map(|step| (*step).to_owned()).collect::<Vec<_>>();
        let compared = |steps: &[String], reference: &[String]| Losses::compare(steps, reference).to_string();
        let reference = steps(&["1 0.5 2", "2 0.25 1"]);
        assert_eq!(compared(&reference, &reference), "bit-equal");
        assert_eq!(compared(&reference[..1], &reference), "differ from step 2");
        assert_eq!(compared(&steps(&["1 0.5 2", "2 0.26 1"]), &reference), "differ from step 2");
        assert_eq!(compared(&[], &reference), "differ from step 1");
    }
}
