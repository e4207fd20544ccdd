//! A `drumline run` that a test observes: what it prints, starts and leaves behind.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rank_test::leftovers::Watch;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::started::BINARY;

const TICK: Duration = Duration::from_millis(5);

/// A job, or one node's part of it. Killed when dropped.
pub(super) struct Job {
    child: Child,
    text: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
    watch: Watch,
    /// Where it puts its temporary files.
    folder: TempDir,
}

impl Job {
    /// `drumline run` with these flags, split at spaces; each rank runs the script.
    pub(super) fn run(flags: &str, script: &str) -> Self {
        let mut command = Command::new(BINARY);
        command.arg("run").args(flags.split_whitespace()).args(["sh", "-c", script]);
        Self::of(command)
    }

    /// Any command that is, or becomes, a launcher.
    pub(super) fn of(mut command: Command) -> Self {
        let (watch, folder) = (Watch::new(), tempfile::tempdir().unwrap());
        let (name, value) = watch.mark();
        let child = command
            .env(name, value)
            .env("TMPDIR", folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn();
        let mut child = child.unwrap();
        let text = Arc::new(Mutex::new(String::new()));
        let readers = vec![
            read_into(&text, child.stdout.take().unwrap()),
            read_into(&text, child.stderr.take().unwrap()),
        ];
        Self { child, text, readers, watch, folder }
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// The process between the launcher and its ranks.
    pub(super) fn keeper(&self) -> Pid {
        self.try_keeper().unwrap_or_else(|| panic!("no keeper:\n{}", self.text()))
    }

    /// The keeper, if it exists.
    pub(super) fn try_keeper(&self) -> Option<Pid> {
        let path = format!("/proc/{0}/task/{0}/children", self.child.id());
        fs::read_to_string(path).ok()?.trim().parse().ok().and_then(Pid::from_raw)
    }

    /// The process of a rank, if it exists. Unlike the processes that it started, it is the leader of its session.
    pub(super) fn rank(&self, rank: usize) -> Option<Pid> {
        let children = |pid: u32| {
            let path = format!("/proc/{pid}/task");
            let threads = fs::read_dir(path).into_iter().flatten().flatten();
            let lists = threads.filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok());
            let pids = |list: String| {
                list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<u32>>()
            };
            lists.flat_map(pids).collect::<Vec<_>>()
        };
        let is_rank = |pid: &u32| {
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            let session = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(3)?.parse().ok());
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            name == "sh\n"
                && session == Some(*pid)
                && environ.split(|byte| *byte == 0).any(|entry| entry == format!("RANK={rank}").as_bytes())
        };
        let mut ranks = children(self.child.id()).into_iter().flat_map(children);
        ranks.find(is_rank).and_then(|pid| Pid::from_raw(pid as i32))
    }

    /// All that was printed so far.
    pub(super) fn text(&self) -> String {
        self.text.lock().unwrap().clone()
    }

    /// Waits until `count` lines hold `needle`.
    pub(super) fn wait_for(&self, needle: &str, count: usize) {
        let begin = Instant::now();
        while self.text().lines().filter(|line| line.contains(needle)).count() < count {
            assert!(begin.elapsed() < Duration::from_secs(30), "no {count} `{needle}` in:\n{}", self.text());
            std::thread::sleep(TICK);
        }
    }

    /// Its exit code (128 + the number for a signal) and all that it printed; it must end `within` that time.
    pub(super) fn end(&mut self, within: Duration) -> (i32, String) {
        let begin = Instant::now();
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None => std::thread::sleep(TICK),
            }
            assert!(begin.elapsed() < within, "still running after {within:?}:\n{}", self.text());
        };
        self.gone(Duration::from_secs(1));
        self.readers.drain(..).for_each(|reader| reader.join().unwrap());
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        (status.code().unwrap_or_else(|| 128 + signal.unwrap()), self.text())
    }

    /// Checks that all its processes and temporary files are gone `within` that time.
    pub(super) fn gone(&self, within: Duration) {
        let begin = Instant::now();
        self.watch.none_within(within).unwrap_or_else(|left| panic!("{left}\n{}", self.text()));
        while fs::read_dir(self.folder.path()).unwrap().next().is_some() {
            assert!(
                begin.elapsed() < within,
                "files left: {:?}",
                fs::read_dir(self.folder.path()).unwrap().collect::<Vec<_>>()
            );
            std::thread::sleep(TICK);
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_into(text: &Arc<Mutex<String>>, pipe: impl Read + Send + 'static) -> JoinHandle<()> {
    let text = Arc::clone(text);
    std::thread::spawn(move || {
        let mut lines = BufReader::new(pipe);
        let mut line = Vec::new();
        while lines.read_until(b'\n', &mut line).unwrap() > 0 {
            text.lock().unwrap().push_str(&String::from_utf8_lossy(&std::mem::take(&mut line)));
        }
    })
}

pub(super) fn free_port() -> u16 {
    drumline_rendezvous::free_port().unwrap()
}
