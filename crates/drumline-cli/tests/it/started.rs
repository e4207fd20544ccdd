//! A `drumline` that runs: its output, read to its end within a bounded time, and its ranks.

use std::fs;
use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

pub(super) const BINARY: &str = env!("CARGO_BIN_EXE_drumline");
const LONGEST: Duration = Duration::from_secs(60);
const TICK: Duration = Duration::from_millis(10);

pub(super) struct Started {
    child: Child,
    streams: [JoinHandle<String>; 2],
}

pub(super) struct Ended {
    pub(super) code: Option<i32>,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

impl Started {
    pub(super) fn new(args: &[&str]) -> Self {
        let mut command = Command::new(BINARY);
        for name in ["RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "DRUMLINE_TRANSPORT"] {
            command.env_remove(name);
        }
        let mut child = command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let streams = [reader(child.stdout.take().unwrap()), reader(child.stderr.take().unwrap())];
        Self { child, streams }
    }

    pub(super) fn end(mut self) -> Ended {
        let begin = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            if begin.elapsed() > LONGEST {
                self.child.kill().unwrap();
            }
            std::thread::sleep(TICK);
        }
        let code = self.child.wait().unwrap().code();
        let [stdout, stderr] = self.streams.map(|stream| stream.join().unwrap());
        Ended { code, stdout, stderr }
    }

    /// The process of a rank, once it runs.
    pub(super) fn pid_of(&self, rank: usize) -> i32 {
        let begin = Instant::now();
        loop {
            if let Some(pid) = find_rank(self.child.id(), rank) {
                return pid;
            }
            assert!(begin.elapsed() < LONGEST, "rank {rank} never started");
            std::thread::sleep(TICK);
        }
    }
}

fn reader(mut stream: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut text = String::new();
        stream.read_to_string(&mut text).unwrap();
        text
    })
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

/// Runs `drumline bench` to a good end and reads what `--json` printed.
pub(super) fn rows(args: &[&str]) -> Vec<Value> {
    let ended = Started::new(&[&["bench"], args, &["--json", "--seconds-per-size", "0.01"]].concat()).end();
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{args:?}");
    serde_json::from_str(&ended.stdout).unwrap()
}
