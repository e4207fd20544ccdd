//! A program for the tests: this test binary, started again so that it runs the one "test" that is the program.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rank_test::leftovers::Watch;
use rustix::process::{Pid, Signal, kill_process};

const LONGEST: Duration = Duration::from_secs(60);

/// Names the case that the program is to run; elsewhere it does nothing.
pub(super) const CASE: &str = "DRUMLINE_TEST_CASE";

pub(super) fn case() -> Option<String> {
    std::env::var(CASE).ok()
}

/// A started program, killed when dropped.
pub(super) struct Program {
    child: Child,
    stdout: BufReader<ChildStdout>,
    watch: Watch,
}

pub(super) struct Ended {
    pub(super) success: bool,
    pub(super) stdout: String,
}

impl Program {
    /// Starts the program `test` (the name of its "test") with a case.
    pub(super) fn start(test: &str, case: &str) -> Self {
        let watch = Watch::new();
        let (mark, value) = watch.mark();
        // Tests that run in the background of a shell are handed down that SIGINT is ignored.
        let mut command = Command::new("env");
        command.arg("--default-signal=INT").arg(std::env::current_exe().unwrap());
        command.args(arguments(test)).env(CASE, case).env(mark, value).stdout(Stdio::piped());
        for name in ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"] {
            command.env_remove(name);
        }
        let mut child = command.spawn().unwrap();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        Self { child, stdout, watch }
    }

    /// Reads on until a line has `needle` in it. The ranks hold the same pipe.
    pub(super) fn wait_for(&mut self, needle: &str) -> String {
        let mut line = String::new();
        while !line.contains(needle) {
            line.clear();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "no `{needle}` before the end");
        }
        line
    }

    pub(super) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    /// Waits for its end and for the end of all that it started.
    pub(super) fn end(mut self) -> Ended {
        let begin = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(begin.elapsed() < LONGEST, "still running");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.watch.none_within(Duration::from_secs(1)).unwrap();
        let mut stdout = String::new();
        self.stdout.read_to_string(&mut stdout).unwrap();
        let success = self.child.wait().unwrap().success();
        Ended { success, stdout }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill().and_then(|()| self.child.wait());
    }
}

impl Ended {
    /// The lines that begin with `start`, in order, without it.
    pub(super) fn lines(&self, start: &str) -> Vec<&str> {
        let mut lines: Vec<_> = self.stdout.lines().filter_map(|line| line.strip_prefix(start)).collect();
        lines.sort_unstable();
        lines
    }

    /// The only line that begins with `start`.
    pub(super) fn line(&self, start: &str) -> &str {
        let lines = self.lines(start);
        assert_eq!(lines.len(), 1, "one `{start}` in:\n{}", self.stdout);
        lines[0]
    }
}

/// libtest's arguments for the one test.
pub(super) fn arguments(test: &str) -> [&str; 5] {
    ["--exact", test, "--nocapture", "--quiet", "--test-threads=1"]
}
