//! A running `drumline`: its output, read to its end with a time limit, and its ranks.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

pub(super) const BINARY: &str = env!("CARGO_BIN_EXE_drumline");
const LONGEST: Duration = Duration::from_secs(120);
const TICK: Duration = Duration::from_millis(10);

pub(super) struct Started {
    child: Launched,
    stdout: Stream,
    stderr: Stream,
}

/// A running `drumline`. It is killed with its ranks if a test fails before its end.
struct Launched(Child);

impl Drop for Launched {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

pub(super) struct Ended {
    pub(super) code: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Started {
    pub(super) fn new(args: &[&str]) -> Self {
        Self::with_variables(args, &[])
    }

    pub(super) fn with_variables(args: &[&str], variables: &[(&str, &str)]) -> Self {
        let mut command = Command::new(BINARY);
        command.args(args).envs(variables.iter().copied());
        Self::of(command)
    }

    /// A command that is or becomes a `drumline`. Variables of the launcher of these tests are removed.
    pub(super) fn of(mut command: Command) -> Self {
        for name in ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "DRUMLINE_TRANSPORT"] {
            if !command.get_envs().any(|(given, _)| given == name) {
                command.env_remove(name);
            }
        }
        let mut child =
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (stdout, stderr) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        Self { child: Launched(child), stdout: Stream::of(stdout), stderr: Stream::of(stderr) }
    }

    pub(super) fn end(mut self) -> Ended {
        let begin = Instant::now();
        while self.child.0.try_wait().unwrap().is_none() {
            if begin.elapsed() > LONGEST {
                self.child.0.kill().unwrap();
            }
            std::thread::sleep(TICK);
        }
        let code = self.child.0.wait().unwrap().code();
        Ended { code, stdout: self.stdout.end(), stderr: self.stderr.end() }
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.child.0.try_wait().unwrap().is_none()
    }

    /// Waits for the first line of stdout that contains `needle`.
    pub(super) fn line_of_stdout(&self, needle: &str) -> String {
        self.stdout.line(needle)
    }

    /// Waits for the first line of stderr that contains `needle`.
    pub(super) fn line_of_stderr(&self, needle: &str) -> String {
        self.stderr.line(needle)
    }

    pub(super) fn stdout_so_far(&self) -> String {
        self.stdout.text.lock().unwrap().clone()
    }

    /// The launcher's own process.
    pub(super) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// The process of a rank, once it runs.
    pub(super) fn pid_of(&self, rank: usize) -> i32 {
        let begin = Instant::now();
        loop {
            if let Some(pid) = find_rank(self.child.0.id(), rank) {
                return pid;
            }
            assert!(begin.elapsed() < LONGEST, "rank {rank} never started");
            std::thread::sleep(TICK);
        }
    }
}

/// A script of `tests/scripts`.
pub(super) fn script(name: &str) -> String {
    format!("{}/tests/scripts/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// The output of a pipe so far.
struct Stream {
    text: Arc<Mutex<String>>,
    reader: JoinHandle<()>,
}

impl Stream {
    fn of(pipe: impl Read + Send + 'static) -> Self {
        let text = Arc::new(Mutex::new(String::new()));
        let theirs = Arc::clone(&text);
        let reader = std::thread::spawn(move || {
            let mut lines = BufReader::new(pipe);
            let mut line = String::new();
            while lines.read_line(&mut line).unwrap() > 0 {
                theirs.lock().unwrap().push_str(&std::mem::take(&mut line));
            }
        });
        Self { text, reader }
    }

    fn line(&self, needle: &str) -> String {
        let begin = Instant::now();
        loop {
            let text = self.text.lock().unwrap().clone();
            if let Some(line) = text.lines().find(|line| line.contains(needle)) {
                return line.to_owned();
            }
            assert!(begin.elapsed() < LONGEST, "no {needle} in {text}");
            std::thread::sleep(TICK);
        }
    }

    fn end(self) -> String {
        self.reader.join().unwrap();
        self.text.lock().unwrap().clone()
    }
}

fn find_rank(parent: u32, rank: usize) -> Option<i32> {
    let mut pids =
        fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.find(|pid: &i32| {
        let read =
            |file: &str| String::from_utf8(fs::read(format!("/proc/{pid}/{file}")).unwrap_or_default());
        let is_child = read("status").unwrap_or_default().contains(&format!("PPid:\t{parent}\n"));
        is_child
            && read("environ").unwrap_or_default().split('\0').any(|entry| entry == format!("RANK={rank}"))
    })
}

/// Runs `drumline bench --json`, which must succeed, and parses its output.
pub(super) fn rows(args: &[&str]) -> Vec<Value> {
    let ended = Started::new(&[&["bench"], args, &["--json", "--seconds-per-size", "0.01"]].concat()).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{args:?}");
    serde_json::from_str(&ended.stdout).unwrap()
}
